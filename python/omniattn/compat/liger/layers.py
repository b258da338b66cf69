"""Layers of `liger_kernel.transformers`. `in_place` and `row_mode` have no effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.compat._errors import errors_of, require_real
from omniattn.compat.liger import functions

_SILU = ("silu", "swish")
_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")


class LigerRMSNorm(nn.Module):
    """Root mean square norm, see :func:`liger_rms_norm`.

    Args:
        hidden_size: N.
        eps: added to the mean square.
        offset: added to the weight.
        casting_mode: "llama", "gemma" or "none", see :func:`liger_rms_norm`.
        init_fn: "ones" or "zeros", initial weights.
        in_place, row_mode: have no effect.
        elementwise_affine: False for no weight.
    """

    weight: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        require_choice(type(self).__name__, "init_fn", init_fn, ("ones", "zeros"))
        self.elementwise_affine = elementwise_affine
        weight = _weight(hidden_size, init_fn) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.variance_epsilon, self.offset = eps, offset
        self.casting_mode, self.in_place, self.row_mode = casting_mode, in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        rest = self.variance_epsilon, self.offset, self.casting_mode
        return functions.liger_rms_norm(hidden_states, self.weight, *rest)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerLayerNorm(nn.Module):
    """Layer norm, whose bias is random at first if `bias` is True, and zero otherwise."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        require_choice("LigerLayerNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _weight(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functions.liger_layer_norm(
            hidden_states, self.weight, self.bias, self.variance_epsilon
        )


class LigerGroupNorm(nn.Module):
    """Norm of groups of channels of (B, num_channels, ...)."""

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
    ) -> None:
        super().__init__()
        require_choice("LigerGroupNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps, self.variance_epsilon = eps, eps
        self.weight = _weight(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        rest = self.num_channels, self.num_groups, self.variance_epsilon
        return functions.liger_group_norm(hidden_states, self.weight, self.bias, *rest)


class LigerFusedAddRMSNorm(nn.Module):
    """Norm of hidden_states + residual; returns both, see :func:`liger_fused_add_rms_norm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        require_choice("LigerFusedAddRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.weight = _weight(hidden_size, init_fn)
        self.variance_epsilon, self.offset = eps, offset
        self.casting_mode, self.in_place = casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rest = self.variance_epsilon, self.offset, self.casting_mode
        return functions.liger_fused_add_rms_norm(hidden_states, residual, self.weight, *rest)


class LigerModulatedRMSNorm(nn.Module):
    """Norm times ``1 + scale``, plus a shift, see :func:`liger_modulated_rms_norm`."""

    weight: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        require_choice("LigerModulatedRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        weight = _weight(hidden_size, init_fn) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.elementwise_affine = elementwise_affine
        self.variance_epsilon, self.offset = eps, offset
        self.casting_mode, self.in_place = casting_mode, in_place

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        options = self.variance_epsilon, self.offset, self.casting_mode
        return functions.liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, *options
        )


class LigerSwiGLUMLP(nn.Module):
    """SwiGLU layer with `hidden_size` and `intermediate_size` of a config of transformers."""

    _activation = "silu"
    _acts: tuple[str, ...] | None = _SILU

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        act = getattr(config, "hidden_act", None)
        if self._acts is not None and act is not None:
            require_choice(type(self).__name__, "config.hidden_act", act, self._acts)
        width, inner = self.hidden_size, self.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        with errors_of(type(self).__name__):
            return functional.glu_mlp(x, *weights, activation=self._activation)


class LigerMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP`."""


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """SwiGLU layer of an expert, whose `intermediate_size` may be given."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config)
        if intermediate_size is not None and intermediate_size != self.intermediate_size:
            self.intermediate_size = intermediate_size
            self.gate_proj = nn.Linear(self.hidden_size, intermediate_size, bias=False)
            self.up_proj = nn.Linear(self.hidden_size, intermediate_size, bias=False)
            self.down_proj = nn.Linear(intermediate_size, self.hidden_size, bias=False)


class LigerGEGLUMLP(LigerSwiGLUMLP):
    """GEGLU layer with the tanh approximation of GELU, whatever the config says."""

    _activation = "gelu_tanh"
    _acts = None


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` that recomputes its projections in the backward.

    `num_shards` has no effect: memory for projections does not grow with the number of layers.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        with errors_of(type(self).__name__):
            return functional.glu_mlp(x, *weights, activation=self._activation, recompute=True)


class LigerTiledGEGLUMLP(LigerTiledSwiGLUMLP):
    """:class:`LigerTiledSwiGLUMLP` with the tanh approximation of GELU."""

    _activation = "gelu_tanh"
    _acts = _GELU


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor],
    mlp_module: Any,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[Tensor] | None = None,
) -> Tensor:
    """Computes ``fn(mlp_module, x)`` for parts of the tokens, and again in the backward.

    Args:
        fn: treats each token alone.
        mlp_module: first argument of fn.
        x: (B, T, D) or (T, D).
        num_shards: number of parts, default T / D, rounded up.
        compute_params: has no effect; it serves DeepSpeed.
    """
    require_real("apply_tiled_mlp", x=x)
    if num_shards is None:
        num_shards = math.ceil(x.shape[-2] / x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    outputs = [
        checkpoint(fn, mlp_module, part, use_reentrant=False)
        for part in rows.chunk(max(1, num_shards))
    ]
    return torch.cat(outputs).unflatten(0, x.shape[:-1])


class LigerBlockSparseTop2MLP(nn.Module):
    """SwiGLU layer of an expert of Mixtral: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        require_choice("LigerBlockSparseTop2MLP", "config.hidden_act", config.hidden_act, _SILU)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with errors_of("LigerBlockSparseTop2MLP"):
            return functional.glu_mlp(x, self.w1.weight, self.w3.weight, self.w2.weight)


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return functions.liger_softmax(x)


class LigerSparsemax(nn.Module):
    """Projection on the simplex, see :func:`liger_sparsemax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return functions.liger_sparsemax(x, self.dim)


class LigerReLUSquared(nn.Module):
    """Square of ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return functions.liger_relu_squared(x)


class LigerDyT(nn.Module):
    """Dynamic tanh (Zhu et al., 2025, arXiv:2503.10622), see :func:`liger_dyt`."""

    beta: Tensor | None

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        return functions.liger_dyt(x, self.alpha, self.gamma, self.beta)


class LigerPolyNorm(nn.Module):
    """Polynomial of norms (PolyCom, 2024, arXiv:2411.03884), see :func:`liger_poly_norm`."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights = self.weight, self.bias
        return functions.liger_poly_norm(hidden_states, *weights, self.variance_epsilon)


class LigerTVDLoss(nn.Module):
    """Total variation distance, see :func:`liger_tvd`."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        reductions = ("batchmean", "mean", "sum", "none")
        require_choice("LigerTVDLoss", "reduction", reduction, reductions)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return functions.liger_tvd(p, q, shift_labels, self.reduction, self.ignore_index)


def _weight(size: int, init_fn: str) -> nn.Parameter:
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))
