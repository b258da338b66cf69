"""Kernels of other libraries on a GPU, under our ops' signatures; a library that is absent raises.

Arguments are passed by name. Each result is compared with fp64 before it is timed, as that of any
other baseline.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from baselines._common import Function, lacks
from torch import Tensor


def _fla(module: str, name: str, scale: float | None = None, **renamed: str) -> Function:
    """Returns a recurrence of flash-linear-attention (names as of commit bc3b101).

    `scale` is the default of ours if that is not K^-0.5; `renamed` gives fla's names of arguments.
    """

    def call(*, l2norm: bool = False, scale: float | None = scale, **given: Any) -> Any:
        function = getattr(import_module(f"fla.ops.{module}"), name)
        options = {"use_qk_l2norm_in_kernel": True} if l2norm else {}
        given = {renamed.get(key, key): value for key, value in given.items()}
        found = function(**given, **options, scale=scale, output_final_state=True)
        return found[0], found[1]

    return call


def _gated_linear_attention(*, g: Tensor | None = None, **given: Any) -> Any:
    """Calls fla's function for decays per channel, per head or none."""
    if g is None:
        return _fla("linear_attn", "chunk_linear_attn")(normalize=False, **given)
    per_channel = g.ndim == 4
    module, name = ("gla", "chunk_gla") if per_channel else ("simple_gla", "chunk_simple_gla")
    return _fla(module, name)(g=g, **given)


def _liger(name: str, *tensors: str, **defaults: Any) -> Function:
    """Returns a function of Liger (names as of commit ead96b6) that takes these tensors by place.

    Its cross entropy writes gradients over the logits, in the forward: times do not depend on them.
    """

    def call(**given: Any) -> Any:
        function = getattr(import_module("liger_kernel.transformers.functional"), name)
        placed = [given.pop(key) for key in tensors]
        return function(*placed, **(defaults | given))

    return call


def _causal_conv1d(
    *, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **options: Any
) -> Tensor:
    lacks(**options)
    function = import_module("causal_conv1d").causal_conv1d_fn
    y: Tensor = function(x.transpose(1, 2), weight, bias, activation=activation)
    return y.transpose(1, 2)


def _selective_scan(
    *,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    lacks(options=bool(options))
    function = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    u, delta, B, C = (t.transpose(1, 2) for t in (u, delta, B, C))
    z = None if z is None else z.transpose(1, 2)
    y, state = function(u, delta, A, B, C, D, z, delta_bias, delta_softplus, True)
    return y.transpose(1, 2), state


def _flash_varlen(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Calls the flash kernel in torch for packed sequences."""
    lacks(options=bool(options))
    bounds = cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k
    found = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False)
    out: Tensor = found[0]
    return out


#: Op -> library -> function.
PEERS: dict[str, dict[str, Function]] = {
    "attention_varlen": {"flash": _flash_varlen},
    "delta_rule": {"fla": _fla("delta_rule", "chunk_delta_rule")},
    "gated_delta_rule": {"fla": _fla("gated_delta_rule", "chunk_gated_delta_rule")},
    "kimi_delta_attention": {"fla": _fla("kda", "chunk_kda")},
    "gated_linear_attention": {"fla": _gated_linear_attention},
    "retention": {"fla": _fla("retention", "chunk_retention")},
    "dplr_delta_rule": {"fla": _fla("generalized_delta_rule", "chunk_dplr_delta_rule", g="gk")},
    "rwkv6": {"fla": _fla("rwkv6", "chunk_rwkv6", scale=1.0)},
    "rwkv7": {"fla": _fla("rwkv7", "chunk_rwkv7", scale=1.0)},
    "selective_scan": {"mamba_ssm": _selective_scan},
    "causal_conv1d": {"causal_conv1d": _causal_conv1d},
    "rms_norm": {"liger": _liger("liger_rms_norm", "x", "weight", eps=1e-6, in_place=False)},
    "layer_norm": {"liger": _liger("liger_layer_norm", "x", "weight", "bias", eps=1e-5)},
    "swiglu": {"liger": _liger("liger_swiglu", "gate", "up")},
    "geglu": {"liger": _liger("liger_geglu", "gate", "up")},
    "cross_entropy": {"liger": _liger("liger_cross_entropy", "logits", "target")},
    "linear_cross_entropy": {
        "liger": _liger("liger_fused_linear_cross_entropy", "x", "weight", "target")
    },
}
