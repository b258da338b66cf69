"""Role of residual forms other than x + f(x): what a layer reads, and where its output goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from omniattn.checks.arguments import require_int
from omniattn.modules.base.fields import Size
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import Layer, LayerConfig


@dataclass(frozen=True)
class StreamsConfig(LayerConfig):
    """Options that all residual forms have."""

    dim: Size
    place: int = 0
    head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int(type(self).__qualname__.removesuffix(".Config"), "place", self.place, 0)


class Streams(Layer):
    """A residual form with a state h (B, T, m dim) of m streams per token, in place of x.

    Each layer of a model has its own, which computes the layer's input with `read` and adds the
    output with `write`. The first one makes h from the embeddings with `start`, and one with `head`
    gives the output of the last layer: ``forward(h)``.
    """

    config: Any

    def start(self, x: Tensor) -> Tensor:
        """Returns h (B, T, m dim) before the first layer from x (B, T, dim)."""
        raise NotImplementedError

    def read(self, h: Tensor) -> tuple[Tensor, Any]:
        """Returns a layer's input (B, T, dim), and what `write` needs."""
        raise NotImplementedError

    def write(self, h: Tensor, y: Tensor, found: Any) -> Tensor:
        """Returns h after a layer with output y (B, T, dim)."""
        raise NotImplementedError

    def forward(self, h: Tensor) -> Tensor:
        """Maps h (B, T, m dim) after the last layer, or a nested one, to (B, T, dim)."""
        h, sequences = sequences_of(type(self).__name__, "h", h)
        return sequences.restored(self.collapse(h))

    def collapse(self, h: Tensor) -> Tensor:
        """Returns the output (B, T, dim) of a model from h; only with `head`."""
        y, _ = self.read(h)
        return y

    def apart(self, h: Tensor) -> Tensor:
        """Returns the streams (B, T, m, dim) of h."""
        return h.unflatten(-1, (-1, self.config.dim))
