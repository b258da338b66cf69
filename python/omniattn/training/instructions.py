"""Batches of instructions for fine-tuning: prompts, and answers that are learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int, shown
from omniattn.training.tasks import Batch

_IGNORED = -100
#: Token ids of a sequence, and its labels.
_Row = tuple[list[int], list[int]]


class InstructionCollator:
    """Makes batches of prompts and answers; only tokens of the answers have a loss.

    An example is a mapping with "prompt" and "answer", each a text or a list of token ids. Its
    sequence is the prompt, the answer and the token `end`. Packed sequences never see one another:
    their positions restart, and attention, recurrences and losses are those of each sequence alone.

    Args:
        encode: function from a text to token ids; None if all examples have token ids.
        end: id of the token after an answer; None for none.
        pad: id of the tokens after shorter sequences, in batches that are not packed.
        packed: put sequences one behind the other instead of padding them to the longest.
        max_length: most tokens of a sequence; None for no limit.

    Notes:
        A call gives the arguments of transformers' models and of `hf.OmniattnForCausalLM`, so that
        it is a `data_collator` and a `collate_fn`. `batch` gives those of `omniattn.models`.

    Raises:
        ValueError: an answer without a token that can be predicted, or more than `max_length`
            tokens.

    Example:
        >>> collate = InstructionCollator(encode=lambda text: list(text.encode()), end=0)
        >>> batch = collate([{"prompt": "1+1=", "answer": "2"}, {"prompt": "a", "answer": "b"}])
        >>> batch["position_ids"].tolist()
        [[0, 1, 2, 3, 4, 5, 0, 1, 2]]
        >>> batch["labels"].tolist()
        [[-100, -100, -100, -100, 50, 0, -100, 98, 0]]
    """

    def __init__(
        self,
        *,
        encode: Callable[[str], list[int]] | None = None,
        end: int | None = None,
        pad: int = 0,
        packed: bool = True,
        max_length: int | None = None,
    ) -> None:
        require_int("InstructionCollator", "pad", pad, 0)
        for name, value, least in (("end", end, 0), ("max_length", max_length, 2)):
            if value is not None:
                require_int("InstructionCollator", name, value, least)
        self.encode, self.end, self.pad = encode, end, pad
        self.packed, self.max_length = packed, max_length

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns input_ids and labels, which transformers shifts by one.

        Packed: one row (1, total) with position_ids. Padded: rows (B, T) with attention_mask.
        """
        rows = self._rows(examples)
        tokens, labels = ([row[part] for row in rows] for part in (0, 1))
        if self.packed:
            positions = [list(range(len(row))) for row in tokens]
            parts = {"input_ids": tokens, "labels": labels, "position_ids": positions}
            return {name: torch.tensor([list(chain(*part))]) for name, part in parts.items()}
        real = [[1] * len(row) for row in tokens]
        return {
            "input_ids": _padded(tokens, self.pad),
            "labels": _padded(labels, _IGNORED),
            "attention_mask": _padded(real, 0),
        }

    def batch(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Returns tokens and targets such that ``model(*batch)`` of omniattn.models is the loss.

        Packed: jagged nested tensors (B, j). Padded: rows (B, T), padded on the right, where the
        tokens of causal models do not see the padding.
        """
        rows = self._rows(examples)
        tokens, targets = [row[0][:-1] for row in rows], [row[1][1:] for row in rows]
        if not self.packed:
            return _padded(tokens, self.pad), _padded(targets, _IGNORED)
        offsets = torch.tensor([0, *(len(row) for row in tokens)]).cumsum(0)
        return tuple(
            torch.nested.nested_tensor_from_jagged(torch.tensor(list(chain(*part))), offsets)
            for part in (tokens, targets)
        )

    def _rows(self, examples: Sequence[Mapping[str, Any]]) -> list[_Row]:
        if not examples:
            raise ValueError("InstructionCollator: examples must not be empty, got []")
        return [self._row(index, example) for index, example in enumerate(examples)]

    def _row(self, index: int, example: Mapping[str, Any]) -> _Row:
        """Returns the ids of an example, and its labels: the answer's ids, but -100 at the start.

        Nothing predicts the first token of a sequence.
        """
        prompt, answer = (self._ids(index, example, name) for name in ("prompt", "answer"))
        if self.end is not None:
            answer = [*answer, self.end]
        tokens, labels = prompt + answer, [_IGNORED] * len(prompt) + answer
        labels[:1] = [_IGNORED]
        if set(labels) <= {_IGNORED}:
            raise ValueError(
                "InstructionCollator: an answer must have a token with another one before it, "
                f"got examples[{index}] of {len(prompt)} and {len(answer)} tokens"
            )
        if self.max_length is not None and len(tokens) > self.max_length:
            raise ValueError(
                f"InstructionCollator: sequences must have at most max_length={self.max_length} "
                f"tokens, got {len(tokens)} in examples[{index}]; leave it out or raise max_length"
            )
        return tokens, labels

    def _ids(self, index: int, example: Mapping[str, Any], name: str) -> list[int]:
        if not isinstance(example, Mapping) or name not in example:
            raise ValueError(
                f"InstructionCollator: examples must be mappings with prompt and answer, got "
                f"examples[{index}]={shown(example)}"
            )
        value = example[name]
        if isinstance(value, str) and self.encode is None:
            raise ValueError(
                "InstructionCollator: encode must be given for texts, "
                f"got {name}={shown(value)} and encode=None"
            )
        ids = self.encode(value) if isinstance(value, str) and self.encode else value
        found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if not all(isinstance(i, int) and i >= 0 for i in found):
            raise ValueError(
                f"InstructionCollator: {name} must be a text or ids >= 0, "
                f"got examples[{index}] with {name}={shown(value)}"
            )
        return found


def _padded(rows: list[list[int]], value: int) -> Tensor:
    """Returns rows (B, T), each filled with `value` up to the longest."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
