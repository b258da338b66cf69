"""Training tasks: batches of a data set and metrics.

A batch is a tuple of arguments such that `model(*batch)` is the mean loss; the targets come last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, shown
from omniattn.models.generation import generate
from omniattn.reference.layers import philox
from omniattn.training.data import ByteData, read_documents

if TYPE_CHECKING:
    from typing_extensions import Self

    from omniattn.models.decoders.decoder import Decoder
    from omniattn.models.encoders.electra import Electra
    from omniattn.models.model import Model

Batch = tuple[Tensor, ...]


def targets_of(batch: Batch) -> int:
    """Returns the number of targets of a batch, without the ignored ones (-100)."""
    return int(batch[-1].ne(-100).sum())


#: Seed of draws for held-out batches.
HELD_OUT_SEED = 0x48454C44


class Task(ABC):
    """A data set with a held-out split, and its batches for one kind of model."""

    #: Unit of the loss.
    unit: ClassVar[str]
    #: Name of an example's items (tokens, images) in displayed speeds.
    items: ClassVar[str]
    #: True if the loss compares the examples of a batch, which has no parts then.
    compares: ClassVar[bool] = False
    #: Number of items in an example.
    items_per_example: int
    #: Identifies the data in checkpoints.
    digest: str
    #: One-line description of both splits' sizes.
    summary: str

    @classmethod
    @abstractmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        """Loads the task from a path, or by default from data found on every machine.

        Args:
            path: a file or folder, or None.
            length: tokens per example of text.

        Raises:
            OSError: if the path cannot be read.
            ValueError: if the data do not fit.
        """

    @abstractmethod
    def batch(self, size: int, seed: int, step: int) -> Batch:
        """Returns `size` training examples of a step, determined by (seed, step)."""

    @abstractmethod
    def held_out_batch(self, size: int) -> Batch:
        """Returns about `size` fixed examples of the held-out split."""

    def parts(self, batch: Batch, count: int) -> list[Batch]:
        """Splits a batch into up to `count` batches of nearly equal sizes."""
        split = (t.tensor_split(min(count, len(t))) for t in batch)
        return [batch] if count == 1 else list(zip(*split, strict=True))

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        """Returns the metrics of a batch, other than the loss, by name."""
        return {}

    def sample(self, model: Model, seed: int) -> str | None:
        """Returns a text sampled from the model, or None if it generates no text."""
        return None


class TextTask(Task):
    """A task on windows of a byte-level text."""

    items = "tokens"

    def __init__(self, text: bytes, length: int) -> None:
        op = type(self).__name__
        if not isinstance(text, bytes | bytearray):
            raise TypeError(
                f"{op}: text must be bytes ({op}.load(path, length) reads a file or folder), "
                f"got text={shown(text)}"
            )
        require_int(op, "length", length, 1)
        self.data = ByteData(text, length)
        self.items_per_example = length
        self.digest = self.data.digest
        self.summary = (
            f"{len(self.data.train):,} bytes to train on, {len(self.data.held_out):,} held out"
        )

    @classmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        return cls(read_documents(path), length)

    def _uniform(self, size: int, kinds: int, seed: int, step: int) -> Tensor:
        """Returns numbers in [0, 1) (kinds, size, length), independent of the choice of windows."""
        shape = (kinds, size, self.data.length)
        places = torch.empty(size + math.prod(shape))
        drawn = functional.uniform_like(places, seed=torch.tensor([seed, step]))
        return drawn[size:].view(shape)


class LanguageModeling(TextTask):
    """Predicts the next byte: tokens and targets (B, length), the targets one byte later.

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
        """Continues "def " up to the training length."""
        prompt = torch.tensor([list(b"def ")], device=next(model.parameters()).device)
        new = max(0, self.data.length - prompt.shape[1])
        out = generate(cast("Decoder", model), prompt, new, temperature=0.8, top_p=0.95, seed=seed)
        return bytes(out[0].tolist()).decode(errors="replace")


class MaskedLanguageModeling(TextTask):
    """Restores masked bytes: tokens and targets (B, length), -100 for bytes without a loss.

    15 % of the bytes are targets; of these, 80 % are masked, 10 % random and 10 % unchanged.

    Reference:
        Devlin et al., "BERT", 2018, arXiv 1810.04805.

    Example:
        >>> task = MaskedLanguageModeling(b"some text" * 90, length=80)
        >>> tokens, targets = task.batch(size=2, seed=0, step=0)
        >>> bool((tokens == task.MASK).any()), bool((targets[tokens == task.MASK] >= 0).all())
        (True, True)
    """

    unit = "nats per masked byte"
    MASK: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257

    def _mask(self, text: Tensor, seed: int, step: int) -> Batch:
        asked, shown, other = self._uniform(text.shape[0], 3, seed, step)
        tokens = torch.where(shown < 0.8, self.MASK, text)
        tokens = torch.where((shown >= 0.8) & (shown < 0.9), (256 * other).long(), tokens)
        chosen = asked < 0.15
        return torch.where(chosen, tokens, text), text.masked_fill(~chosen, -100)

    def batch(self, size: int, seed: int, step: int) -> Batch:
        return self._mask(self.data.windows(size, seed, step)[:, :-1], seed, step)

    def held_out_batch(self, size: int) -> Batch:
        return self._mask(self.data.held_out_windows(size)[:, :-1], HELD_OUT_SEED, 0)

    def sample(self, model: Model, seed: int) -> str:
        """Returns a held-out text with the predicted bytes in brackets."""
        tokens, targets = self.held_out_batch(1)
        logits = model(tokens.to(next(model.parameters()).device))[0]
        restored = logits[:, :256].argmax(-1).tolist()
        asked = (targets[0] >= 0).tolist()
        parts = zip(tokens[0].tolist(), restored, asked, strict=True)
        return b"".join(
            b"[%c]" % guess if hidden else b"%c" % byte for byte, guess, hidden in parts
        ).decode(errors="replace")


class ReplacedTokens(MaskedLanguageModeling):
    """Finds bytes that a generator put in place of masked ones; batches as in the base class.

    The model, an :class:`omniattn.models.Electra`, makes the proposals. `found` is the share of
    replaced bytes that the discriminator names, `accuracy` the share of all bytes that it judges
    right.

    Reference:
        Clark et al., "ELECTRA", 2020, arXiv 2003.10555.

    Example:
        >>> tokens, targets = ReplacedTokens(b"some text" * 90, length=80).batch(2, 0, 0)
        >>> tokens.shape, targets.shape
        (torch.Size([2, 80]), torch.Size([2, 80]))
    """

    unit = "nats per masked byte and 50 times nats per byte"

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        proposed, replaced, _ = cast("Electra", model).propose(*batch)
        judged = (model(proposed) > 0).long()
        hits = (judged * replaced).sum() / replaced.sum().clamp(min=1)
        accuracy = (judged == replaced).double().mean()
        return {"found": float(hits), "accuracy": float(accuracy)}

    def sample(self, model: Model, seed: int) -> str:
        """Returns a held-out text with proposals; those that the model names are in brackets."""
        device = next(model.parameters()).device
        tokens, targets = (t.to(device) for t in self.held_out_batch(1))
        proposed, _, _ = cast("Electra", model).propose(tokens, targets)
        named = (model(proposed)[0] > 0).tolist()
        parts = zip(proposed[0].clamp(max=255).tolist(), named, strict=True)
        marked = (b"[%c]" % byte if bad else b"%c" % byte for byte, bad in parts)
        return b"".join(marked).decode(errors="replace")


class SpanCorruption(TextTask):
    """Restores missing spans: source (B, S), tokens and targets (B, R).

    15 % of the bytes are missing, in spans of 3 on average. In the source a sentinel replaces each
    span; the targets are each sentinel followed by its span, then an end token. Tokens are the
    targets shifted right by one. All lengths follow from the window's, so nothing is padded.

    Reference:
        Raffel et al., "Exploring the Limits of Transfer Learning", 2020, arXiv 1910.10683.

    Example:
        >>> source, tokens, targets = SpanCorruption(b"some text" * 90, length=80).batch(2, 0, 0)
        >>> source.shape, targets.shape  # 68 of 80 bytes, 4 sentinels, the end; 12 bytes, ...
        (torch.Size([2, 73]), torch.Size([2, 17]))
    """

    unit = "nats per target token"
    SENTINEL: ClassVar[int] = 256  # first sentinel
    SENTINELS: ClassVar[int] = 100
    END: ClassVar[int] = 356
    START: ClassVar[int] = 357
    vocab_size: ClassVar[int] = 358

    def __init__(self, text: bytes, length: int) -> None:
        super().__init__(text, length)
        self.missing = max(1, round(0.15 * length))
        self.spans = max(1, round(self.missing / 3))
        if self.spans > self.SENTINELS or length < 2 * self.missing:
            raise ValueError(
                f"span corruption must have 1 to {self.SENTINELS} spans and as much text left, "
                f"got windows of {length} tokens with {self.spans} spans"
            )

    def _corrupt(self, text: Tensor, seed: int, step: int) -> Batch:
        size, length = text.shape
        first, second = self._uniform(size, 2, seed, step)
        kept = self._partition(length - self.missing, first)
        missing = self._partition(self.missing, second)
        # Kept and missing segments alternate; 2 i + 1 is the index of missing segment i.
        ends = torch.stack([kept, missing], -1).flatten(1).cumsum(-1)
        position = torch.arange(length).expand(size, -1).contiguous()
        segment = torch.searchsorted(ends, position, right=True)
        gone = segment % 2 == 1
        sentinel = self.SENTINEL + segment // 2
        before = torch.cat([segment.new_full((size, 1), -1), segment[:, :-1]], 1)
        after = torch.cat([segment[:, 1:], segment.new_full((size, 1), -1)], 1)
        # The sentinel replaces the first byte of a missing segment in the source, and the last byte
        # of the kept segment before it in the targets; the segment's other bytes are removed.
        starts, stops = gone & (segment != before), ~gone & (segment != after)
        source = torch.where(starts, sentinel, text)[~gone | starts].view(size, -1)
        targets = torch.where(stops, sentinel, text)[gone | stops].view(size, -1)
        end = text.new_full((size, 1), self.END)
        source, targets = torch.cat([source, end], 1), torch.cat([targets, end], 1)
        start = text.new_full((size, 1), self.START)
        return source, torch.cat([start, targets[:, :-1]], 1), targets

    def _partition(self, total: int, uniform: Tensor) -> Tensor:
        """Returns lengths (B, spans) >= 1 with sum `total`, uniform over all such partitions."""
        cuts = uniform[:, : total - 1].argsort(-1)[:, : self.spans - 1].sort(-1).values + 1
        ends = torch.nn.functional.pad(cuts, (0, 1), value=total)
        return ends.diff(prepend=torch.zeros_like(ends[:, :1]))

    def batch(self, size: int, seed: int, step: int) -> Batch:
        return self._corrupt(self.data.windows(size, seed, step)[:, :-1], seed, step)

    def held_out_batch(self, size: int) -> Batch:
        return self._corrupt(self.data.held_out_windows(size)[:, :-1], HELD_OUT_SEED, 0)

    def sample(self, model: Model, seed: int) -> str:
        """Returns a held-out text with the generated spans in brackets."""
        source, _, targets = self.held_out_batch(1)
        device = next(model.parameters()).device
        start = torch.tensor([[self.START]], device=device)
        out = generate(
            cast("Decoder", model),
            start,
            2 * targets.shape[1],
            eos=self.END,
            seed=seed,
            source=source.to(device),
        )
        spans: dict[int, bytes] = {}
        current = -1
        for token in out[0, 1:].tolist():
            if token >= self.SENTINEL:
                current = token
            spans[current] = spans.get(current, b"") + (b"%c" % token if token < 256 else b"")
        return b"".join(
            b"%c" % token if token < 256 else b"[%s]" % spans.get(token, b"")
            for token in source[0, :-1].tolist()
        ).decode(errors="replace")


class Digits(Task):
    """Classifies handwritten digits: images (B, 1, 8, 8) in [0, 1] and labels (B,).

    The data are scikit-learn's 1 797 images; every fifth is held out.

    Reference:
        Kaynak, "Methods of combining multiple classifiers", 1995 (UCI repository).
    """

    unit = "nats per image"
    items = "images"
    items_per_example = 1

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "the digits need scikit-learn; install with: pip install 'omniattn[train]'"
            ) from error
        data = load_digits()
        images = torch.from_numpy(data.images).float()[:, None] / 16
        labels = torch.from_numpy(data.target).long()
        held_out = torch.arange(len(images)) % 5 == 0
        self.train = images[~held_out], labels[~held_out]
        self.held_out = images[held_out], labels[held_out]
        self.digest = f"digits-{len(images)}"
        self.summary = (
            f"{len(self.train[0]):,} images to train on, {len(self.held_out[0]):,} held out"
        )

    @classmethod
    def load(cls, path: Path | str | None, length: int) -> Self:
        if path is not None:
            raise ValueError("this model trains on the digits of scikit-learn, not on other data")
        return cls()

    def chosen(self, size: int, seed: int, step: int) -> Tensor:
        """Returns the indices of the training examples of a step."""
        words = philox.elementwise_words(size, torch.tensor([seed, step]))
        return (words * len(self.train[0])) >> 32

    def batch(self, size: int, seed: int, step: int) -> Batch:
        index = self.chosen(size, seed, step)
        return self.train[0][index], self.train[1][index]

    def held_out_batch(self, size: int) -> Batch:
        """Returns all held-out examples."""
        return self.held_out

    def metrics(self, model: Model, batch: Batch) -> dict[str, float]:
        images, labels = batch
        return {"accuracy": float((model(images).argmax(-1) == labels).double().mean())}
