"""MiniMax's lightning attention computed by this package's recurrence."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.hf.common.packed import packing_of, refuse
from omniattn.hf.common.probe import Finding, Left, probing, takes

__all__ = ["lightning_forward"]

_TAKEN = ("hidden_states", "position_embeddings", "attention_mask", "cache")


@functools.cache
def lightning_forward(kind: Any) -> Finding:
    """Returns a forward of lightning attention based on `functional.gated_linear_attention`."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Maps hidden_states (B, T, E) to the same shape and the state (B, H, D, D).

        The state is in fp32 for half dtypes; attention_mask is (B, T).
        """
        packing = packing_of(hidden_states, kwargs)
        if not takes(hidden_states):
            refuse(packing, kind.__name__)
            given = hidden_states, position_embeddings, attention_mask, cache
            theirs: tuple[Tensor, Tensor] = kind.forward(self, *given, **kwargs)
            return theirs
        rows = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            rows = (rows * attention_mask[:, :, None]).to(rows.dtype)
        heads = rows.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
        if packing is not None:
            heads = packing.join(heads)
        q, k, v = heads.split(self.head_dim, 3)
        out, state = functional.gated_linear_attention(
            q,
            k,
            v,
            -self.slope_rate.flatten().expand(q.shape[:3]),
            scale=1.0,
            initial_state=None if cache is None else cache.get_linear_cache(self.layer_idx),
            cu_seqlens=None if packing is None else packing.cu_seqlens,
        )
        if packing is not None:
            out, state = packing.split(out), packing.last(state)
        out = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(out.flatten(2))
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        return self.out_proj(out), state

    taken = tuple(inspect.signature(kind.forward).parameters)[1:-1]
    if taken != _TAKEN:
        return Left(f"its forward takes {', '.join(taken)}")
    return forward if _same(kind, forward) else Left("it computes something else")


class _States:
    """A minimal cache with one state of linear attention."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.state = state


def _same(kind: Any, ours: Any) -> bool:
    """Returns True if both layers give equal results for a padded prompt and one more token."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "block_size": 4}
    options = {"hidden_act": "silu", "layer_types": ["linear_attention"] * 3}
    with probing():
        layer = kind(SimpleNamespace(**sizes, **options), 1).float()
        mask = torch.ones(2, 11)
        mask[0, :3] = 0
        prompt, token = torch.randn(2, 11, 8), torch.randn(2, 1, 8)
        found = []
        for forward in (kind.forward, ours):
            states = _States()
            first, _ = forward(layer, prompt, None, mask, cache=states)
            last, state = forward(layer, token, None, None, cache=states)
            found.append((first, last, state))
    return all(
        torch.allclose(own, theirs, rtol=1e-4, atol=1e-5)
        for theirs, own in zip(*found, strict=True)
    )
