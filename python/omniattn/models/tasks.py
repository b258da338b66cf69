"""What models are trained on: batches of a data set, and what is said of the results.

A batch is the tuple of arguments that makes `model(*batch)` the mean loss; the targets come last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from omniattn.models.data import ByteData, read_documents
from omniattn.models.generate import generate

if TYPE_CHECKING:
    from typing_extensions import Self

    from omniattn.models.decoder import Decoder
    from omniattn.models.model import Model

Batch = tuple[Tensor, ...]


class Task(ABC):
    """A data set with a held-out split, seen by one kind of model."""

    #: What the loss is counted in.
    unit: ClassVar[str]
    #: What an example consists of, for the speed.
    items: ClassVar[str]
    #: Number of them in an example.
    items_per_example: int
    #: Identifies the data, for checkpoints.
    digest: str
    #: One line on the sizes of both splits.
    summary: str

    @classmethod
    @abstractmethod
    def load(cls, path: Path | None, length: int) -> Self:
        """The task on the data of a path, by default data that come with the machine.

        Args:
            path: a file or folder, or None.
            length: tokens per example, for texts.

        Raises:
            OSError: if the path cannot be read.
            ValueError: if the data do not fit.
        """

    @abstractmethod
    def batch(self, size: int, seed: int, step: int) -> Batch:
        """`size` training examples of a step: a function of (seed, step) alone."""

    @abstractmethod
    def held_out_batch(self, size: int) -> Batch:
        """About `size` fixed examples of the held-out split."""

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        """What else than the loss is measured on a batch, by name."""
        return {}

    def sample(self, model: Model, seed: int) -> str | None:
        """A text that shows what the model can do, None if it makes no text."""
        return None


class TextTask(Task):
    """A task on the windows of a text of bytes."""

    items = "tokens"

    def __init__(self, text: bytes, length: int) -> None:
        self.data = ByteData(text, length)
        self.items_per_example = length
        self.digest = self.data.digest
        self.summary = (
            f"{len(self.data.train):,} bytes to train on, {len(self.data.held_out):,} held out"
        )

    @classmethod
    def load(cls, path: Path | None, length: int) -> Self:
        return cls(read_documents(path), length)


class LanguageModeling(TextTask):
    """Predict the next byte: tokens and targets (B, length), the targets one byte later.

    Example:
        >>> task = LanguageModeling(b"some text" * 9, length=8)
        >>> tokens, targets = task.batch(size=2, seed=0, step=0)
        >>> torch.equal(tokens[:, 1:], targets[:, :-1])
        True
    """

    unit = "nats per byte"

    def batch(self, size: int, seed: int, step: int) -> Batch:
        window = self.data.windows(size, seed, step)
        return window[:, :-1], window[:, 1:]

    def held_out_batch(self, size: int) -> Batch:
        window = self.data.held_out_windows(size)
        return window[:, :-1], window[:, 1:]

    def sample(self, model: Model, seed: int) -> str:
        """Continues "def " to the length that the model was trained on."""
        prompt = torch.tensor([list(b"def ")], device=next(model.parameters()).device)
        new = max(0, self.data.length - prompt.shape[1])
        out = generate(cast("Decoder", model), prompt, new, temperature=0.8, top_p=0.95, seed=seed)
        return bytes(out[0].tolist()).decode(errors="replace")
