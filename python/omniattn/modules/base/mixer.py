"""The roles of the layers of a block: token mixers, channel mixers, norms."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.modules.base.layer import Layer
from omniattn.modules.base.state import Stateful


def require_tokens(op: str, x: Tensor, dim: int) -> None:
    """x must be (B, T, dim)."""
    if x.is_nested or x.ndim != 3 or x.shape[2] != dim:
        got = "a nested tensor" if x.is_nested else f"x.shape={tuple(x.shape)}"
        raise ValueError(f"{op}: x must have shape (B, T, {dim}), got {got}")


def require_no_mask(op: str, mask: Tensor | Mask | None) -> None:
    if mask is not None:
        raise ValueError(f"{op}: mask must be None, got mask={shown(mask)}")


class Mixer(Layer, Stateful):
    """A layer (B, T, dim) -> (B, T, dim) that mixes tokens and can go on from a state.

    `forward` takes by name

    - state: from `new_state` or None. x are the tokens that follow those in it;
    - rope: cos, sin of the positions of x, or None. A mixer that rotates nothing ignores it;
    - mask: boolean, True = attend, broadcastable to (B, heads, T, S), or None. A mixer that cannot
      obey it raises;
    - score_mod, only where `takes_score_mod` is true: f(score, b, h, q, k), see
      `functional.attention`, or None;
    - shared, only where `shares` is true: a dict of tensors in which the layers of a model pass
      something on in one call, beginning with the `embeddings` of the tokens; or None.

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
    #: True if `new_state` takes an `eviction`.
    evicts: ClassVar[bool] = False


class ChannelMixer(Layer):
    """A layer (..., dim) -> (..., dim) that treats each token alone, or routes it.

    One that reads earlier tokens has the `new_state` of a Mixer too, and takes `state` and `mask`
    by name.
    """


class Norm(Layer):
    """A layer x -> norm(x), or (x, residual) -> (norm(h), h) with h = x + residual."""
