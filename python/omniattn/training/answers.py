"""Task of instructions: decoders learn the answers to prompts of a file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from omniattn.checks.arguments import require_int, shown
from omniattn.models.generation import generate
from omniattn.reference.layers import philox
from omniattn.training.instructions import InstructionCollator
from omniattn.training.tasks import Batch, Task

if TYPE_CHECKING:
    from typing_extensions import Self

    from omniattn.models.decoders.decoder import Decoder
    from omniattn.models.model import Model


class Instructions(Task):
    """Answers prompts: tokens and targets (B, T) of bytes, -100 for bytes without a loss.

    A zero byte ends each answer. Only answers and their ends have a loss. Every twentieth example
    is held out, and at least one.

    Args:
        examples: at least two mappings with the texts "prompt" and "answer".
        length: most bytes of a prompt and its answer together.

    Raises:
        ValueError: too few examples, an empty answer or an example that is too long.

    Example:
        >>> task = Instructions([{"prompt": "1+1=", "answer": "2"}] * 2, length=8)
        >>> tokens, targets = task.batch(size=1, seed=0, step=0)
        >>> targets.tolist()
        [[-100, -100, -100, 50, 0]]
    """

    unit = "nats per byte of an answer"
    items = "tokens"
    END: ClassVar[int] = 0
    _EVERY: ClassVar[int] = 20

    def __init__(self, examples: Sequence[Mapping[str, Any]], length: int) -> None:
        require_int("Instructions", "length", length, 1)
        if len(examples) < 2:
            raise ValueError(
                f"Instructions: examples must be at least two, got {len(examples)} of them"
            )
        self._collate = InstructionCollator(
            encode=lambda text: list(text.encode()),
            end=self.END,
            packed=False,
            max_length=length + 1,
        )
        for index in range(len(examples)):  # the whole file is checked before the training
            self._collate.batch(examples[index : index + 1])
        places = range(len(examples))
        self.held_out = [examples[i] for i in places if i % self._EVERY == 0]
        self.train = [examples[i] for i in places if i % self._EVERY]
        sizes = [len((e["prompt"] + e["answer"]).encode()) for e in self.train]
        self.items_per_example = max(1, sum(sizes) // len(sizes))
        text = json.dumps([[e["prompt"], e["answer"]] for e in examples])
        self.digest = f"instructions-{len(examples)}-{zlib.crc32(text.encode()):08x}"
        self.summary = f"{len(self.train):,} examples to train on, {len(self.held_out):,} held out"

    @classmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        """Reads a file with a JSON object in each line."""
        if path is None:
            raise ValueError(
                "instructions need a file with a JSON object in each line, such as "
                '{"prompt": "1 + 1 = ", "answer": "2"}'
            )
        examples = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON ({error})") from error
            texts = [found.get(n) for n in ("prompt", "answer")] if isinstance(found, dict) else []
            if not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError(
                    f"line {number} must have the texts prompt and answer, got {shown(found)}"
                )
            examples.append(found)
        return cls(examples, length)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        words = philox.elementwise_words(size, torch.tensor([seed, step]))
        chosen = ((words * len(self.train)) >> 32).tolist()
        return self._collate.batch([self.train[i] for i in chosen])

    def held_out_batch(self, size: int) -> Batch:
        return self._collate.batch(self.held_out[:size])

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        """Returns the share of answers whose bytes are all the most probable ones."""
        tokens, targets = batch
        right = (model(tokens).argmax(-1) == targets) | (targets < 0)
        return {"right answers": float(right.all(-1).double().mean())}

    def sample(self, model: Model, seed: int) -> str:
        """Returns up to four held-out prompts, each with its generated answer in brackets."""
        device = next(model.parameters()).device
        lines = []
        for example in [e for e in self.held_out if e["prompt"]][:4]:
            prompt = torch.tensor([list(example["prompt"].encode())], device=device)
            new = len(example["answer"].encode()) + 1
            out = generate(cast("Decoder", model), prompt, new, eos=self.END, temperature=0.0)
            answer = bytes(i for i in out[0, prompt.shape[1] :].tolist() if 0 < i < 256)
            lines.append(f"{example['prompt']}[{answer.decode(errors='replace')}]")
        return "\n".join(lines)
