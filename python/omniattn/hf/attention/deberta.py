"""Disentangled attention of DeBERTa (both versions) and SEW-D."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.functional import attention
from omniattn.functional.masks import BoolMask
from omniattn.functional.scores import DistanceRows
from omniattn.hf.attention.attention import collects_weights
from omniattn.hf.common.probe import Finding, Left, probing

__all__ = ["disentangled_forward", "find_disentangled"]

_TAKEN = (
    *("hidden_states", "attention_mask", "output_attentions"),
    *("query_states", "relative_pos", "rel_embeddings"),
)


def disentangled_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> Any:
    """Maps hidden_states (B, T, E) to the heads' outputs of the same shape.

    attention_mask (B, 1, T, T) is not 0 for pairs that may attend. The layer's own code runs where
    attention weights or queries of other states are wanted, or relative_pos (1, T, T) depends on
    more than the distance.
    """
    given = output_attentions, query_states, relative_pos, rel_embeddings
    plain = query_states is None and not output_attentions and not collects_weights(self)
    rows = _rows_of_distances(self, hidden_states.shape[1], relative_pos)
    if not plain or rows is None:
        return self.omniattn_original.forward(self, hidden_states, attention_mask, *given)
    q, k, v = _heads(self, hidden_states)
    terms = {} if rel_embeddings is None else _terms(self, rel_embeddings, rows)
    out = attention(
        q,
        k,
        v,
        mask=_visible(attention_mask),
        scale=(_head_dim(self) * (1 + len(self.pos_att_type))) ** -0.5,
        dropout_p=_p(self.dropout) if self.training else 0.0,
        **terms,
    )
    return out.flatten(2), None


def _p(dropout: Any) -> float:
    """Returns the probability of a dropout layer."""
    p: float = dropout.p
    return p


def _head_dim(self: Any) -> int:
    size: int = self.attention_head_size
    return size


def _heads(self: Any, x: Tensor) -> list[Tensor]:
    """Returns queries, keys and values (B, T, H, D)."""
    heads = self.num_attention_heads, -1
    if not hasattr(self, "in_proj"):
        parts = (self.query_proj, self.key_proj, self.value_proj)
        return [part(x).unflatten(-1, heads) for part in parts]
    q, k, v = self.in_proj(x).unflatten(-1, heads).chunk(3, -1)
    return [q + self.q_bias.view(heads), k, v + self.v_bias.view(heads)]


def _visible(mask: Tensor) -> BoolMask | None:
    seen = mask.bool()
    if not torch.compiler.is_compiling() and bool(seen.all()):
        return None
    return BoolMask(seen)


def _rows_of_distances(self: Any, length: int, relative_pos: Tensor | None) -> Tensor | None:
    """Returns the embedding (2 T - 1,) of each distance k - i, or None if pairs have others."""
    if not self.relative_attention:
        return torch.zeros(0, dtype=torch.int64)
    if relative_pos is None or relative_pos.dim() != 3 or relative_pos.shape[0] != 1:
        return None
    known = relative_pos[0]
    if known.shape != (length, length):
        return None
    if not torch.compiler.is_compiling() and not torch.equal(known[1:, 1:], known[:-1, :-1]):
        return None
    distances = torch.cat([known[:, 0].flip(0), known[0, 1:]]).long()
    if hasattr(self, "pos_ebd_size"):
        return (distances + self.pos_ebd_size).clamp(0, 2 * self.pos_ebd_size - 1)
    span = min(length, self.max_relative_positions)
    return (distances + span).clamp(0, 2 * span - 1) + self.max_relative_positions - span


def _terms(self: Any, rel_embeddings: Tensor, rows: Tensor) -> dict[str, Any]:
    """Returns the score terms of relative positions as options of functional.attention."""
    positions = self.pos_dropout(rel_embeddings)
    first = hasattr(self, "in_proj")
    shared = getattr(self, "share_att_key", False)
    names = {
        "c2p": "pos_proj" if first else "key_proj" if shared else "pos_key_proj",
        "p2c": "pos_q_proj" if first else "query_proj" if shared else "pos_query_proj",
    }
    found = {}
    for term, option in (("c2p", "relative_keys"), ("p2c", "relative_queries")):
        if term in self.pos_att_type:
            projected = getattr(self, names[term])(positions)
            heads = projected.unflatten(-1, (self.num_attention_heads, -1))
            found[option] = DistanceRows(heads.index_select(0, rows), len(rows) // 2)
    return found


def find_disentangled(module: nn.Module) -> Finding:
    """Returns :func:`disentangled_forward` for layers equivalent to it."""
    kind: Any = type(module)
    if kind.__name__ != "DisentangledSelfAttention":
        return None
    if getattr(module, "talking_head", False):
        return Left("it mixes the scores of its heads")
    return _found(kind)


@functools.cache
def _found(kind: Any) -> Finding:
    taken = list(inspect.signature(kind.forward).parameters)[1:]
    if taken != list(_TAKEN):
        return Left(f"its forward takes {', '.join(taken)}")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}
    dropout = {
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        **{"activation_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    }
    relative = {"relative_attention": True, "max_relative_positions": 3, "position_buckets": -1}
    with probing():
        for types, shared in ((["c2p", "p2c"], False), (["p2c"], True)):
            options = {"pos_att_type": types, "share_att_key": shared, "talking_head": False}
            layer = kind(SimpleNamespace(**sizes, **dropout, **relative, **options)).float()
            layer.omniattn_original = kind
            x = torch.randn(2, 6, 8, dtype=torch.float32)
            mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
            mask[1, :, :, 4:] = False
            places = torch.arange(6)
            given: dict[str, Any] = {"relative_pos": (places[:, None] - places)[None]}
            given["rel_embeddings"] = torch.randn(6, 8, dtype=torch.float32)
            ours = disentangled_forward(layer, x, mask, **given)[0]
            theirs = kind.forward(layer, x, mask, **given)[0]
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                return Left("it computes something else")
    return disentangled_forward
