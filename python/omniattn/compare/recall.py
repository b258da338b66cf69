"""Recall tasks with generated data: each example has one right answer."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.training import Batch, Task

if TYPE_CHECKING:
    from typing_extensions import Self

    from omniattn.models import Model

_HELD_OUT_SEED = 0x48454C44
#: Target that the loss ignores.
IGNORED = -100


class RecallTask(Task):
    """Tokens (B, length) and targets, which are IGNORED except where an answer is due.

    Tokens 0 to `symbols` - 1 are symbols, further ones are marks. An answer is the token after the
    position of its target.

    Args:
        length: tokens of an example.
        symbols: number of symbols.

    Raises:
        ValueError: the length is too short for the task.
    """

    unit = "nats per answer"
    items = "tokens"
    #: Name in the report.
    name: ClassVar[str]
    #: Number of marks.
    marks: ClassVar[int] = 2
    #: Probability of an answer by chance.
    chance: float

    def __init__(self, length: int = 64, symbols: int = 16) -> None:
        self.symbols = symbols
        self.items_per_example = length
        self.digest = f"{self.name}-{length}-{symbols}"
        self.summary = f"{self.name}, {length} tokens"
        self.chance = 1 / symbols
        if length < self.least_length:
            raise ValueError(
                f"{type(self).__name__}: length must be >= {self.least_length} with "
                f"symbols={symbols}, got length={length}"
            )

    @classmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        if path is not None:
            raise ValueError(f"{cls.__name__}: path must be None, got path={shown(path)}")
        return cls(length)

    @property
    @abstractmethod
    def least_length(self) -> int:
        """Shortest length that the task fits into."""

    @property
    def vocab_size(self) -> int:
        """Number of symbols and marks."""
        return self.symbols + self.marks

    @abstractmethod
    def draw(self, size: int, generator: torch.Generator) -> Batch:
        """Returns `size` examples: tokens and targets."""

    def batch(self, size: int, seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        return self.draw(size, generator)

    def held_out_batch(self, size: int) -> Batch:
        return self.draw(size, torch.Generator().manual_seed(_HELD_OUT_SEED))

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        return {"accuracy": float(right(model, batch).double().mean())}

    def _noise(self, size: int, generator: torch.Generator) -> Tensor:
        shape = (size, self.items_per_example)
        return torch.randint(self.symbols, shape, generator=generator)


def right(model: Model, batch: Batch) -> Tensor:
    """Returns True for each right answer of a batch, one after the other."""
    tokens, targets = batch
    due = targets != IGNORED
    answers: Tensor = model(tokens)[due].argmax(-1)
    return answers == targets[due]


def _permutations(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns independent permutations (size, count)."""
    return torch.rand(size, count, generator=generator).argsort(-1)


class Needle(RecallTask):
    """Noise with one mark and a symbol after it; the last token asks for that symbol.

    ``distances`` are the tokens between the needle and the question, evenly spread.
    """

    name = "needle"

    @property
    def least_length(self) -> int:
        return 4

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        length = self.items_per_example
        place = torch.randint(length - 2, (size,), generator=generator)
        return self.at(place, generator)

    def at(self, place: Tensor, generator: torch.Generator) -> Batch:
        """Returns an example for each place (B,) of the mark."""
        tokens = self._noise(len(place), generator)
        rows = torch.arange(len(place))
        tokens[rows, place] = self.symbols
        tokens[:, -1] = self.symbols + 1
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -1] = tokens[rows, place + 1]
        return tokens, targets


class AssociativeRecall(RecallTask):
    """Pairs of a key and a value, then all keys in another order, each followed by its value.

    The first half of the symbols are keys, the others values, so that chance is 2 / symbols.

    Reference:
        Arora et al., "Zoology", 2023, arXiv 2312.04927.
    """

    name = "associative recall"
    marks = 0

    def __init__(self, length: int = 64, symbols: int = 16) -> None:
        super().__init__(length, symbols)
        self.chance = 2 / symbols
        #: Number of pairs: as many as fit, at most one for each key.
        self.pairs = min(length // 4, symbols // 2)
        self.items_per_example = 4 * self.pairs

    @property
    def least_length(self) -> int:
        return 8

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        half, n = self.symbols // 2, self.pairs
        keys = _permutations(size, half, generator)[:, :n]
        values = half + torch.randint(half, (size, n), generator=generator)
        order = _permutations(size, n, generator)
        shown_pairs = torch.stack([keys, values], -1).flatten(1)
        asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
        tokens = torch.cat([shown_pairs, asked], 1)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, 2 * n :: 2] = tokens[:, 2 * n + 1 :: 2]
        return tokens, targets


class MultiHop(RecallTask):
    """Shuffled links "a b" of a chain; a mark and its first symbol ask for the symbol two hops on.

    Each example has `chains` chains a -> b -> c of different symbols, and asks for all of them.
    """

    name = "multi-hop"
    marks = 1
    chains: ClassVar[int] = 4

    @property
    def least_length(self) -> int:
        return 7 * self.chains

    def __init__(self, length: int = 28, symbols: int = 16) -> None:
        super().__init__(length, symbols)
        if symbols < 3 * self.chains:
            raise ValueError(
                f"MultiHop: symbols must be >= {3 * self.chains}, got symbols={symbols}"
            )
        self.items_per_example = self.least_length

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        n = self.chains
        a, b, c = _permutations(size, self.symbols, generator)[:, : 3 * n].split(n, 1)
        links = torch.stack([torch.cat([a, b], 1), torch.cat([b, c], 1)], -1)  # (size, 2 n, 2)
        order = _permutations(size, 2 * n, generator)
        links = links.gather(1, order[..., None].expand(-1, -1, 2)).flatten(1)
        order = _permutations(size, n, generator)
        mark = torch.full((size, n), self.symbols)
        asked = torch.stack([mark, a.gather(1, order), c.gather(1, order)], -1).flatten(1)
        tokens = torch.cat([links, asked], 1)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, 4 * n + 1 :: 3] = tokens[:, 4 * n + 2 :: 3]
        return tokens, targets


class SelectiveCopy(RecallTask):
    """Symbols scattered among blanks; after a mark, the symbols follow in their order.

    Reference:
        Gu and Dao, "Mamba", 2023, arXiv 2312.00752.
    """

    name = "selective copy"
    copied: ClassVar[int] = 8

    @property
    def least_length(self) -> int:
        return 2 * self.copied + 1

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        n, length = self.copied, self.items_per_example
        blank, mark = self.symbols, self.symbols + 1
        content = torch.randint(self.symbols, (size, n), generator=generator)
        before = length - n
        places = _permutations(size, before, generator)[:, :n].sort(-1).values
        tokens = torch.full((size, before), blank).scatter(1, places, content)
        tokens = torch.cat([tokens, torch.full((size, 1), mark), content[:, :-1]], 1)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, before:] = content
        return tokens, targets


#: Recall tasks by name.
TASKS: dict[str, type[RecallTask]] = {
    task.name: task for task in (Needle, AssociativeRecall, MultiHop, SelectiveCopy)
}
