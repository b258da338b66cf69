"""Rules of dtypes under torch.autocast, for docs/ops.md and the property `autocast`.

A function follows one rule for all of its floating-point tensors, whatever mix of dtypes they
come in. A tensor that calls take in float32 anyway (decays, sinks, the residual of a norm) stays
so. float64 is never cast to fewer bits. Statistics keep the dtype of sums, since they must come as
another function returned them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["KEPT", "LEADERS", "MEANING", "Rule", "rule_of"]

Rule: TypeAlias = Literal["cast", "first", "widest"]

#: Meaning of each rule, as docs/ops.md says it.
MEANING: dict[Rule, str] = {
    "cast": "all are cast to the dtype of autocast, as for torch's products",
    "first": "all take the dtype of the first argument (`rwkv4`: of k), which stays as it is",
    "widest": "all take the widest of their dtypes, as for torch's losses",
}

#: Functions that follow another rule than "first".
_OTHERS: dict[Rule, tuple[str, ...]] = {
    "cast": (
        *("attention", "attention_cached", "attention_varlen", "attention_weights"),
        *("bigbird_attention", "detsa_attention", "dual_chunk_attention", "hub_spoke_attention"),
        *("local_strided_attention", "longformer_attention", "moba_attention", "na1d", "na2d"),
        *("na3d", "nsa_attention", "routed_block_attention", "rwkv_quadratic"),
        *("scaled_dot_product_attention", "select_attention", "selected_attention"),
        *("selective_attention", "dsa_indexer", "dsa_indexer_loss"),
        *("glu_mlp", "linear", "linear_cross_entropy", "linear_jsd", "linear_log_prob", "mlp"),
        "moe_experts",
    ),
    "widest": ("jsd",),
}

#: The argument that rule "first" speaks of, where it is not the first one.
LEADERS = {"rwkv4": "k"}

#: Statistics, which are refused in another dtype.
KEPT = frozenset(("lse", "penalty"))


def rule_of(name: str) -> Rule:
    """The rule of a public function."""
    return next((rule for rule, names in _OTHERS.items() if name in names), "first")
