"""Dtype rules under torch.autocast, for docs/ops.md and the property `autocast`.

A function follows one rule for all of its floating-point tensors, for any mix of dtypes. Tensors
that calls accept in float32 anyway (decays, sinks, the residual of a norm) stay in float32. float64
is never cast down. Statistics keep the dtype in which another function returned them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["KEPT", "LEADERS", "MEANING", "Rule", "rule_of"]

Rule: TypeAlias = Literal["cast", "first", "widest"]

#: Meaning of each rule, for docs/ops.md.
MEANING: dict[Rule, str] = {
    "cast": "all are cast to the dtype of autocast, as for torch's products",
    "first": "all take the dtype of the first argument (`rwkv4`: of k), which stays as it is",
    "widest": "all take the widest of their dtypes, as for torch's losses",
}

#: Functions by rule; all others follow "first".
_OTHERS: dict[Rule, tuple[str, ...]] = {
    "cast": (
        *("attention", "attention_cached", "attention_varlen", "attention_weights"),
        *("bigbird_attention", "detsa_attention", "dual_chunk_attention", "hub_spoke_attention"),
        *("local_strided_attention", "longformer_attention", "moba_attention", "na1d", "na2d"),
        *("na3d", "nsa_attention", "routed_block_attention", "rwkv_quadratic"),
        *("scaled_dot_product_attention", "select_attention", "selected_attention"),
        *("selective_attention", "dsa_indexer", "dsa_indexer_loss", "forgetting_attention"),
        *("path_attention", "wall_attention"),
        *("glu_mlp", "linear", "linear_cross_entropy", "linear_jsd", "linear_log_prob", "mlp"),
        *("moe_experts", "stick_breaking_attention", "softpick_attention"),
        *("sparsemax_attention", "multi_token_attention", "parallax_attention"),
    ),
    "widest": ("jsd",),
}

#: Argument that rule "first" refers to, if not the first.
LEADERS = {"rwkv4": "k"}

#: Statistics, which must have their own dtype.
KEPT = frozenset(("lse", "penalty", "log_f"))


def rule_of(name: str) -> Rule:
    """Returns the rule of a public function."""
    return next((rule for rule, names in _OTHERS.items() if name in names), "first")
