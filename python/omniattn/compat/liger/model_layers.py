"""Norms and feed-forward layers of `liger_kernel.transformers` that are named after models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.compat._errors import errors_of
from omniattn.compat.liger import functions
from omniattn.compat.liger.layers import LigerGEGLUMLP, LigerRMSNorm, LigerSwiGLUMLP


class LigerRMSNormForGemma(LigerRMSNorm):
    """:class:`LigerRMSNorm` with 1 added to a weight that starts at 0."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """:class:`LigerRMSNormForGemma`."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """:class:`LigerRMSNormForGemma`."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """:class:`LigerRMSNormForGemma` of width `dim`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """:class:`LigerRMSNorm` of width `dim`; False for `with_scale` leaves the weight out."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(
            dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale
        )
        self.with_scale = with_scale


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """:class:`LigerRMSNorm`."""


class LigerRMSNormForGlm4(LigerRMSNorm):
    """:class:`LigerRMSNorm`."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """SwiGLU layer with gate and up projection in one, of a config of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        require_choice("LigerPhi3SwiGLUMLP", "config.hidden_act", config.hidden_act, _SILU)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = *self.gate_up_proj.weight.chunk(2), self.down_proj.weight
        with errors_of("LigerPhi3SwiGLUMLP"):
            return functional.glu_mlp(x, *weights)


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP`; `layer_idx` and `is_shared_mlp` have no effect, as in Liger."""

    def __init__(
        self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False
    ) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """:class:`LigerGEGLUMLP`, twice as wide in layers that share keys and values.

    These are the last `config.num_kv_shared_layers` layers, with `config.use_double_wide_mlp`.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config)
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0
        if wide and layer_idx is not None and layer_idx >= first:
            self.intermediate_size *= 2
            self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
            self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
            self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)


class LigerExperts(nn.Module):
    """SwiGLU experts of a config of transformers, see :func:`functional.moe_experts`.

    Parameters gate_up_proj (E, 2 F, D) and down_proj (E, D, F), uninitialised as in Liger.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        require_choice("LigerExperts", "config.hidden_act", config.hidden_act, _SILU)
        own = hasattr(config, "num_experts")
        self.num_experts: int = config.num_experts if own else config.num_local_experts
        own = hasattr(config, "moe_intermediate_size")
        inner: int = config.moe_intermediate_size if own else config.intermediate_size
        self.intermediate_dim, self.hidden_dim = inner, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, inner))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Maps (..., D), with experts and their weights (..., k), to the same shape."""
        names = {"x": "hidden_states", "index": "top_k_index", "weights": "top_k_weights"}
        with errors_of("LigerExperts", **names, up="gate_up_proj", down="down_proj"):
            x = hidden_states.reshape(-1, self.hidden_dim)
            index, weights = (t.reshape(len(x), -1) for t in (top_k_index, top_k_weights))
            y = functional.moe_experts(x, index, weights, self.gate_up_proj, self.down_proj)
        return y.view(hidden_states.shape)


class LigerFalconH1SwiGLUMLP(nn.Module):
    """SwiGLU layer with factors of the gate and of the result, `config.mlp_multipliers`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        op = "LigerFalconH1SwiGLUMLP"
        require_choice(op, "config.hidden_act", config.hidden_act, _SILU)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias: bool = getattr(config, "mlp_bias", False)
        width, inner = self.hidden_size, self.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.gate_multiplier, self.down_multiplier = map(float, config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) * self.gate_multiplier
        inner = functions.liger_swiglu(gate, self.up_proj(x)) * self.down_multiplier
        y: Tensor = self.down_proj(inner)
        return y


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """:class:`LigerFalconH1SwiGLUMLP`."""


def liger_multimodal_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: list[int],
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotates q (B, Hq, T, D) and k (B, Hkv, T, D) at positions of time, height and width.

    Args:
        q, k: queries and keys.
        cos, sin: (3, B, T, D), whose halves are equal.
        mrope_section: numbers of pairs of time, height and width, D / 2 together.
        unsqueeze_dim: has no effect, as there.
    """
    op = "liger_multimodal_rotary_pos_emb"
    if cos.ndim != 4 or len(cos) != 3 or 2 * sum(mrope_section) != cos.shape[-1]:
        raise ValueError(
            f"{op}: cos must have shape (3, B, T, D) with D twice the sum of mrope_section, got "
            f"cos.shape={tuple(cos.shape)}, mrope_section={shown(mrope_section)}"
        )
    parts = [t.split(list(mrope_section) * 2, -1) for t in (cos, sin)]
    cos, sin = (torch.cat([part[n % 3] for n, part in enumerate(t)], -1) for t in parts)
    return functions.liger_rope(q, k, cos, sin)


def liger_qwen2vl_mrope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: list[int],
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`liger_multimodal_rotary_pos_emb`."""
    return liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim)


_SILU = ("silu", "swish")
