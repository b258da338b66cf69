"""Attention of BigBird and BigBird-Pegasus: full, and sparse with transformers' random blocks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omniattn.functional import bigbird_attention
from omniattn.hf.attention.attention import attention_forward, collects_weights
from omniattn.hf.common.probe import Finding, Forward, Left, probing
from omniattn.hf.patching.subclass import subclass

__all__ = ["block_sparse_forward", "find_bigbird", "full_forward", "layer_forward"]

#: Lengths for which transformers draws random blocks by the paper's plans.
_PLANNED = (1024, 3072, 4096)


def _heads(self: Any, x: Tensor, *names: str) -> list[Tensor]:
    """Returns the named projections of x (B, T, E), each (B, T, H, D)."""
    shape = (self.num_attention_heads, self.attention_head_size)
    return [getattr(self, name)(x).unflatten(-1, shape) for name in names]


def block_sparse_forward(
    self: Any,
    hidden_states: Tensor,
    band_mask: Tensor | None = None,
    from_mask: Tensor | None = None,
    to_mask: Tensor | None = None,
    from_blocked_mask: Tensor | None = None,
    to_blocked_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Maps hidden_states (B, T, E) to the same shape.

    to_mask (B, 1, 1, T) is 1 for real tokens; the other masks repeat it.
    """
    if kwargs.get("output_attentions") or collects_weights(self):
        raise NotImplementedError(
            f"omniattn.hf: {type(self).__name__} gives no output_attentions with this package's "
            "attention; use omniattn.hf.patch(model, attention=False)"
        )
    length = hidden_states.shape[1]
    if length % self.block_size:
        raise ValueError(
            f"omniattn.hf: {type(self).__name__} needs a length that is a multiple of "
            f"block_size={self.block_size}, got T={length}"
        )
    out = bigbird_attention(
        *_heads(self, hidden_states, "query", "key", "value"),
        block=self.block_size,
        rand_blocks=_random_blocks(self, length).to(hidden_states.device),
        count_duplicates=True,
        key_padding=None if to_mask is None else to_mask[:, 0, 0] > 0,
    )
    return out.flatten(2), None


def _random_blocks(self: Any, length: int) -> Tensor:
    """Returns the random blocks (H, T / block - 2, r) of this layer, as transformers chooses them.

    Block 0 in evaluation; in training, draws of the layer's own methods from numpy's generator.
    """
    size, count, heads = self.block_size, self.num_random_blocks, self.num_attention_heads
    rows = length // size - 2
    if not self.training:
        return torch.zeros(heads, rows, count, dtype=torch.int64)
    np.random.seed(self.seed)
    if length in _PLANNED:
        longest = self.max_seqlen
        drawn = [
            self._bigbird_block_rand_mask(longest, longest, size, size, count, last_idx=1024)[:rows]
            for _ in range(heads)
        ]
    else:
        ends, counts = self._get_rand_attn_plan(length, size, count)
        drawn = self._bigbird_block_rand_mask_with_head(
            from_seq_length=length,
            to_seq_length=length,
            from_block_size=size,
            to_block_size=size,
            num_heads=heads,
            plan_from_length=ends,
            plan_num_rand_blocks=counts,
        )
    return torch.from_numpy(np.stack(drawn)).long()


def full_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes full attention with additive masks (B, 1, 1 | Tq, Tk); a decoder uses a cache."""
    cache = kwargs.pop("past_key_values", None) if cache is None else cache  # until 5.23
    crossed = encoder_hidden_states is not None
    (q,) = _heads(self, hidden_states, "query")
    if crossed and cache is not None and cache.get_seq_length(self.layer_idx) > 0:
        kept = cache.layers[self.layer_idx]
        k, v = kept.keys, kept.values
    else:
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        k, v = (t.transpose(1, 2) for t in _heads(self, seen, "key", "value"))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
    out, weights = attention_forward(
        self,
        q.transpose(1, 2),
        k,
        v,
        encoder_attention_mask if crossed else attention_mask,
        dropout=self.dropout.p if self.training else 0.0,
        is_causal=False,
        output_attentions=kwargs.get("output_attentions"),
    )
    return out.flatten(2), weights


def layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Patches the inner attention, then runs the layer's own forward.

    The model replaces the inner module at run time when a text is short.
    """
    found = find_bigbird(self.self)
    if callable(found):
        kind: Any = type(self.self)
        self.self.__class__ = subclass(kind, found)
    return self.omniattn_original.forward(self, *args, **kwargs)


_OURS: dict[str, Forward] = {
    "SelfAttention": full_forward,
    "BlockSparseAttention": block_sparse_forward,
}


def find_bigbird(module: nn.Module) -> Finding:
    """Returns our forward for a BigBird attention module or for the layer that contains it."""
    kind: Any = type(module)
    name = kind.__name__.removeprefix("BigBird").removeprefix("Pegasus")
    if name == kind.__name__ or hasattr(module, "omniattn_original"):
        return None
    if name in ("Attention", "EncoderAttention") and hasattr(module, "set_attention_type"):
        return layer_forward
    return _found(name, kind) if name in _OURS else None


@functools.cache
def _found(name: str, kind: Any) -> Finding:
    ours = _OURS[name]
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64}
    blocks = {"num_random_blocks": 1, "block_size": 2, "use_bias": True, "is_decoder": False}
    with probing():
        real = torch.ones(2, 18, dtype=torch.float32)
        real[1, 13:] = 0
        layer = kind(SimpleNamespace(**sizes, **blocks, attention_probs_dropout_prob=0.0), 0)
        x, layer = torch.randn(2, 18, 8, dtype=real.dtype), layer.float().eval()
        sparse = ours is block_sparse_forward
        given = _masks(real, 2) if sparse else [(1 - real[:, None, None]) * -1e4]
        own, theirs = (f(layer, x, *given)[0][real > 0] for f in (ours, kind.forward))
    same = torch.allclose(own, theirs, rtol=1e-4, atol=1e-5)
    return ours if same else Left("it computes something else")


def _masks(real: Tensor, block: int) -> list[Tensor]:
    """Returns the masks that the models derive from real (B, T)."""
    blocked = real.unflatten(1, (-1, block))
    near = torch.cat([blocked[:, 1:-3], blocked[:, 2:-2], blocked[:, 3:-1]], 2)
    band = blocked[:, 2:-2, :, None] * near[:, :, None]
    return [band[:, None], real[:, None, :, None], real[:, None, None], blocked, blocked]
