"""Byte-level text data with a training and a held-out split."""

import random
import sysconfig
import zlib
from pathlib import Path

import torch

from omniattn.reference.layers import philox

_HELD_OUT = 0.05
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def standard_library() -> list[Path]:
    """Returns the Python source files of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [f for f in files if _SKIPPED.isdisjoint(f.relative_to(root).parts)]


def read_documents(path: Path | str | None) -> bytes:
    """Reads a file, all text files below a directory, or (None) the standard library's sources.

    Files are shuffled with a fixed seed, so that both splits are similar.

    Raises:
        OSError: if the path cannot be read.
    """
    if path is None:
        files = standard_library()
    elif Path(path).is_dir():
        files = sorted(f for f in Path(path).rglob("*") if f.is_file())
    else:
        return Path(path).read_bytes()
    random.Random(0).shuffle(files)
    documents = (f.read_bytes() for f in files)
    return b"\n".join(text for text in documents if b"\0" not in text)


class ByteData:
    """Windows of `length` + 1 bytes; the last 5 percent of the text is held out.

    Args:
        text: at least 4 (length + 1) bytes.
        length: tokens per window.

    Raises:
        ValueError: if the text is too short.
    """

    def __init__(self, text: bytes, length: int) -> None:
        window = length + 1
        if len(text) < 4 * window:
            raise ValueError(
                f"the text must have at least {4 * window} bytes for windows of {length} tokens, "
                f"got {len(text)} bytes"
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        held_out = max(window, int(_HELD_OUT * len(text)))
        self.train, self.held_out = tokens[:-held_out], tokens[-held_out:]
        self.length = length
        self.digest = f"{len(text)}-{zlib.crc32(text):08x}"

    def _windows(self, split: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return split[start[:, None] + torch.arange(self.length + 1)].long()

    def windows(self, size: int, seed: int, step: int) -> torch.Tensor:
        """Returns the training windows (size, length + 1) of a step, determined by (seed, step)."""
        words = philox.elementwise_words(size, torch.tensor([seed, step]))
        return self._windows(self.train, (words * (len(self.train) - self.length)) >> 32)

    def held_out_windows(self, size: int) -> torch.Tensor:
        """Returns up to `size` windows, evenly spaced in the held-out split, without overlap."""
        count = min(size, len(self.held_out) // (self.length + 1))
        start = torch.arange(count) * (len(self.held_out) // count)
        return self._windows(self.held_out, start)
