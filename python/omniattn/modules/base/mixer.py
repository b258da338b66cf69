"""Roles of layers in a block: token mixers, channel mixers, norms."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.modules.base.layer import Layer
from omniattn.modules.base.state import Stateful


def require_tokens(op: str, x: Tensor, dim: int) -> None:
    """Requires that x has shape (B, T, dim)."""
    if x.is_nested or x.ndim != 3 or x.shape[2] != dim:
        got = "a nested tensor" if x.is_nested else f"x.shape={tuple(x.shape)}"
        raise ValueError(f"{op}: x must have shape (B, T, {dim}), got {got}")


def require_no_mask(op: str, mask: Tensor | Mask | None) -> None:
    if mask is not None:
        raise ValueError(f"{op}: mask must be None, got mask={shown(mask)}")


class Mixer(Layer, Stateful):
    """A layer (B, T, dim) -> (B, T, dim) that mixes tokens and can continue from a state.

    `forward` has these keyword arguments, None by default:

    - state: a state from `new_state`; x are the tokens after those in the state;
    - rope: (cos, sin) at the positions of x; ignored by mixers without rotary embeddings;
    - mask: boolean, True = attend, broadcastable to (B, heads, T, S); mixers that cannot apply it
      raise an error;
    - score_mod, only if `takes_score_mod` is True: f(score, b, h, q, k), see
      `functional.attention`;
    - convolve, only if `convolved_width` is not 0: a function (B, T, width) -> (B, T, width) of the
      layer's queries, keys and values, joined;
    - shared, only if `shares` is True: a dict by which layers pass tensors to later layers within
      one call of the model; it starts with the token `embeddings`.

    Example:
        >>> from omniattn.modules import Attention
        >>> layer = Attention(dim=8, num_heads=2)
        >>> state, x = layer.new_state(1, 4), torch.randn(1, 4, 8)
        >>> with torch.no_grad():
        ...     steps = torch.cat([layer(x[:, :3], state=state), layer(x[:, 3:], state=state)], 1)
        ...     torch.testing.assert_close(steps, layer(x))
    """

    shares: ClassVar[bool] = False
    takes_score_mod: ClassVar[bool] = False
    #: True if `new_state` accepts an `eviction`.
    evicts: ClassVar[bool] = False
    #: True if `new_state` accepts a `kv_dtype`.
    quantizes: ClassVar[bool] = False

    @property
    def convolved_width(self) -> int:
        """Number of channels that `convolve` maps, 0 if the layer takes none."""
        return 0

    @property
    def publishes(self) -> tuple[str, ...]:
        """Names that the layer writes into `shared`."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names that the layer reads from `shared`, which earlier layers publish."""
        return ()


class ChannelMixer(Layer):
    """A layer (..., dim) -> (..., dim) that transforms tokens independently, or routes them.

    A channel mixer that reads earlier tokens also has `new_state`, as a Mixer, and the keyword
    arguments `state` and `mask`. One with a `convolved_width` takes `convolve`, a function
    (B, T, width) -> (B, T, width) of its hidden channels before the activation.
    """

    @property
    def convolved_width(self) -> int:
        """Number of channels that `convolve` maps, 0 if the layer takes none."""
        return 0


class Norm(Layer):
    """A layer x -> norm(x), or (x, residual) -> (norm(h), h) with h = x + residual."""
