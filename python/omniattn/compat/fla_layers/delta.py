"""Layers with delta rules: DeltaNet, gated DeltaNet and Kimi delta attention."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice
from omniattn.compat._fla.delta import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda
from omniattn.compat._fla.norms import FusedRMSNormGated, RMSNorm
from omniattn.compat.fla_layers.base import RecurrentLayer


def elu_p1(x: Tensor) -> Tensor:
    """Computes elu(x) + 1."""
    return nnf.elu(x) + 1


def sum_norm(x: Tensor) -> Tensor:
    """Divides by the sum of the last dimension."""
    return x / x.sum(-1, keepdim=True)


class DeltaLayer(RecurrentLayer):
    """Base class: widths of heads, and the output with a norm and a gate."""

    use_gate = True
    g_proj: nn.Module
    o_norm: nn.Module
    o_proj: nn.Module

    def _heads(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
    ) -> tuple[int, int, int]:
        """Sets widths, and returns those of keys and values and the number of value heads."""
        op = type(self).__name__
        self.hidden_size, self.expand_v, self.head_dim = hidden_size, expand_v, head_dim
        self.num_heads, self.num_v_heads = num_heads, num_v_heads or num_heads
        self.head_k_dim, self.head_v_dim = head_dim, int(head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        if not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5):
            raise ValueError(
                f"{op}: head_dim * expand_v must be an integer, got {head_dim} * {expand_v}"
            )
        if self.num_v_heads > num_heads and self.num_v_heads % num_heads:
            raise ValueError(
                f"{op}: num_v_heads must be a multiple of num_heads, got "
                f"num_v_heads={num_v_heads}, num_heads={num_heads}"
            )
        return self.key_dim, self.value_dim, self.num_v_heads

    def _decays(self, rates: Tensor, steps: int) -> None:
        """Creates `A_log`, the logarithms of the rates, and `dt_bias` of a number of steps."""
        self.A_log = nn.Parameter(rates.log())
        self.dt_bias = nn.Parameter(time_steps(steps))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _output(self, eps: float, activation: str = "swish") -> None:
        """Creates the norm, the gate if there is one, and the projection of the outputs."""
        if self.use_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
            self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=eps, activation=activation)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def _output_of_rank(self, eps: float) -> None:
        """Creates a norm with a gate of low rank, and the projection of the outputs."""
        rank = self.head_v_dim
        self.g_proj = nn.Sequential(
            nn.Linear(self.hidden_size, rank, bias=False), nn.Linear(rank, self.value_dim)
        )
        self.o_norm = FusedRMSNormGated(rank, eps=eps, activation="sigmoid")
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def _activated(self, projected: list[Tensor]) -> list[Tensor]:
        """Returns q, k and v with an activation where no convolution has applied one."""
        return projected if self.use_short_conv else [nnf.silu(x) for x in projected]

    def _projected_out(self, o: Tensor, x: Tensor) -> Tensor:
        """Returns the heads o (B, T, H, V), normalized, gated and projected."""
        if self.use_gate:
            o = self.o_norm(o, self.g_proj(x).unflatten(-1, o.shape[2:]))
        else:
            o = self.o_norm(o)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y


class DeltaNet(DeltaLayer):
    """DeltaNet, see :func:`functional.delta_rule`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        d_model: hidden_size under its former name, or None.
        hidden_size: width of x and y.
        expand_k, expand_v: widths of all keys and values, as multiples of hidden_size.
        num_heads: number of heads.
        use_beta: False for writing strengths of 1.
        use_gate: True for a gate of the outputs.
        use_short_conv, conv_size, conv_bias: short convolutions of q, k and v.
        allow_neg_eigval: True to double the writing strengths.
        layer_idx: number of the layer, for a cache.
        qk_activation: "silu", "relu", "elu" or "identity".
        qk_norm: "l2" or "sum".
        norm_eps: added to the mean square of the outputs.
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        op = "DeltaNet"
        if mode == "fused_chunk":
            raise NotImplementedError(f'{op}: mode must be "chunk", got the former "fused_chunk"')
        self._start(mode, layer_idx)
        self._sizes(d_model or hidden_size, expand_k, expand_v, num_heads)
        choices = ("silu", "relu", "elu", "identity")
        require_choice(op, "qk_activation", qk_activation, choices)
        require_choice(op, "qk_norm", qk_norm, ("l2", "sum"))
        self.qk_activation, self.qk_norm, self.use_beta = qk_activation, qk_norm, use_beta
        self.use_gate, self.allow_neg_eigval = use_gate, allow_neg_eigval
        width, keys, values = self.hidden_size, self.key_dim, self.value_dim
        self.q_proj = nn.Linear(width, keys, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        if use_beta:
            self.b_proj = nn.Linear(width, num_heads, bias=False)
        warn_without_convolutions(use_short_conv)
        activation = "silu" if qk_activation == "silu" else None
        self._convolutions(use_short_conv, conv_size, conv_bias, activation, q=keys, k=keys)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", v=values)
        self._output(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = projected
        if not self.use_short_conv:
            q, k = (nnf.silu(q), nnf.silu(k)) if self.qk_activation == "silu" else (q, k)
            v = nnf.silu(v)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        if self.qk_activation in ("relu", "elu"):
            activate = torch.relu if self.qk_activation == "relu" else elu_p1
            q, k = activate(q), activate(k)
        if self.qk_norm == "sum":
            q, k = sum_norm(q), sum_norm(k)
        beta = self.b_proj(x).sigmoid() if self.use_beta else torch.ones_like(q[..., 0])
        o, recurrent = chunk_delta_rule(
            q, k, v.unflatten(-1, (-1, self.head_v_dim)), beta * (1 + self.allow_neg_eigval),
            **sequences,
            use_qk_l2norm_in_kernel=self.qk_norm == "l2",
        )  # fmt: skip
        return self._projected_out(o, x), recurrent


class GatedDeltaNet(DeltaLayer):
    """Gated DeltaNet, see :func:`functional.gated_delta_rule`.

    Args:
        hidden_size: width of x and y.
        expand_v: width of a head of values, as a multiple of head_dim.
        head_dim, num_heads: width and number of heads of q and k.
        num_v_heads: number of heads of values, a multiple of num_heads.
        mode: "chunk" or "fused_recurrent"; has no effect.
        use_gate: False for no gate of the outputs.
        use_short_conv: False for no short convolutions of q, k and v.
        allow_neg_eigval: True to double the writing strengths.
        conv_size, conv_bias: number of taps and bias of the convolutions.
        layer_idx: number of the layer, for a cache.
        norm_eps: added to the mean square of the outputs.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        sizes = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)
        self.allow_neg_eigval, self.use_gate = allow_neg_eigval, use_gate
        keys, values, heads = sizes
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, heads, bias=False)
        self._decays(torch.empty(heads).uniform_(0, 16), heads)
        warn_without_convolutions(use_short_conv)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", q=keys, k=keys, v=values)
        self._output(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = self._activated(projected)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        o, recurrent = chunk_gated_delta_rule(
            q, k, v.unflatten(-1, (-1, self.head_v_dim)), self.a_proj(x), self.b_proj(x),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval, A_log=self.A_log, dt_bias=self.dt_bias,
            state_v_first=True, **sequences,
        )  # fmt: skip
        return self._projected_out(o, x), recurrent


class KimiDeltaAttention(DeltaLayer):
    """Kimi delta attention, see :func:`functional.kimi_delta_attention`.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads: see :class:`GatedDeltaNet`.
        mode, use_short_conv, allow_neg_eigval: see there.
        safe_gate: True for initial rates of 1.
        lower_bound: bound of the log-decays, or None.
        conv_size, conv_bias, layer_idx, norm_eps: see there.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        sizes = self._heads(hidden_size, expand_v, head_dim, num_heads, num_v_heads)
        self.allow_neg_eigval, self.safe_gate = allow_neg_eigval, safe_gate
        self.lower_bound = lower_bound
        keys, values, heads = sizes
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self._convolutions(use_short_conv, conv_size, conv_bias, "silu", q=keys, k=keys, v=values)
        self.gate_dim = heads * head_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.gate_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, heads, bias=False)
        rates = torch.ones(heads) if safe_gate else torch.empty(heads).uniform_(1, 16)
        self._decays(rates, self.gate_dim)
        self._output_of_rank(norm_eps)

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        q, k, v = self._activated(projected)
        q, k, g = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k, self.f_proj(x)))
        o, recurrent = chunk_kda(
            q, k, v.unflatten(-1, (-1, self.head_v_dim)), g, self.b_proj(x),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval, A_log=self.A_log, dt_bias=self.dt_bias,
            lower_bound=self.lower_bound, state_v_first=True, **sequences,
        )  # fmt: skip
        return self._projected_out(o, x), recurrent


def time_steps(count: int) -> Tensor:
    """Returns inverse softplus values of steps between 0.001 and 0.1, evenly in the logarithm."""
    dt = (torch.rand(count) * math.log(100) + math.log(0.001)).exp().clamp(min=1e-4)
    return dt + (-torch.expm1(-dt)).log()


def warn_without_convolutions(use: bool) -> None:
    if not use:
        warnings.warn("use_short_conv=False makes models of delta rules much worse", stacklevel=3)
