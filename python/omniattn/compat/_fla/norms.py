"""fla's norms: `fla.modules.layernorm` and `fla.modules.fused_norm_gate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int
from omniattn.compat._errors import errors_of, require_flags, require_optional, require_real
from omniattn.compat._mamba.parts import GatedLayerNorm, GatedRMSNorm
from omniattn.compat._norms import added, normed
from omniattn.reference.precision import widen

Normed = Tensor | tuple[Tensor, Tensor]


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Normed:
    """Computes the layer norm of h = x + residual.

    Args:
        x: (..., N).
        weight, bias: (N,), or None.
        residual: of the shape of x, or None for 0.
        eps: added to the variance.
        prenorm: if True, returns (y, h).
        residual_in_fp32: if True, h is fp32 even if there is no residual.
        is_rms_norm: if True, computes the root mean square norm.

    Returns:
        y of the dtype of x; h of the dtype of the residual.
    """
    require_flags("layer_norm", is_rms_norm=is_rms_norm, prenorm=prenorm)
    return _norm(
        "layer_norm", x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Normed:
    """Computes :func:`layer_norm` with ``is_rms_norm=True``."""
    require_flags("rms_norm", prenorm=prenorm)
    return _norm("rms_norm", x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normed:
    """Computes :func:`layer_norm` of each of `num_groups` parts of the last dimension."""
    require_flags("group_norm", is_rms_norm=is_rms_norm, prenorm=prenorm)
    rest = residual, eps, prenorm, residual_in_fp32, is_rms_norm
    return _norm("group_norm", x, weight, bias, *rest, num_groups)


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """Computes :func:`layer_norm` times act(g).

    Args:
        x, weight, bias, residual, prenorm, residual_in_fp32, eps: see :func:`layer_norm`.
        g: of the shape of x.
        activation: "swish", "silu" or "sigmoid".
    """
    rest = residual, prenorm, residual_in_fp32, eps
    return _gated("layer_norm_gated", x, g, weight, bias, activation, *rest, is_rms_norm=False)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normed:
    """Computes :func:`layer_norm_gated` with a root mean square norm."""
    rest = residual, prenorm, residual_in_fp32, eps
    return _gated("rms_norm_gated", x, g, weight, bias, activation, *rest, is_rms_norm=True)


class LayerNorm(nn.Module):
    """Layer norm of a sum, see :func:`layer_norm`."""

    _norm: ClassVar[Callable[..., Normed]] = staticmethod(layer_norm)
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        _parameters(
            self, hidden_size, elementwise_affine, elementwise_affine and bias, device, dtype
        )

    def reset_parameters(self) -> None:
        _reset(self)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        weights = self.weight, self.bias
        return self._norm(x, *weights, residual, self.eps, prenorm, residual_in_fp32)


class RMSNorm(LayerNorm):
    """Root mean square norm of a sum, see :func:`rms_norm`."""

    _norm = staticmethod(rms_norm)


class GroupNorm(nn.Module):
    """Norm of each part of the last dimension, see :func:`group_norm`."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_int("GroupNorm", "num_groups", num_groups, 1)
        if hidden_size % num_groups != 0:
            raise ValueError(
                f"GroupNorm: hidden_size must be a multiple of num_groups, got {hidden_size=}, "
                f"{num_groups=}"
            )
        self.num_groups, self.hidden_size, self.eps = num_groups, hidden_size, eps
        self.elementwise_affine, self.is_rms_norm = elementwise_affine, is_rms_norm
        _parameters(
            self, hidden_size, elementwise_affine, elementwise_affine and bias, device, dtype
        )

    def reset_parameters(self) -> None:
        _reset(self)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.hidden_size}, eps={self.eps}"

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        rest = residual, self.eps, prenorm, residual_in_fp32, self.is_rms_norm, self.num_groups
        return group_norm(x, self.weight, self.bias, *rest)


class FusedLayerNormGated(nn.Module):
    """Layer norm times a gate, see :func:`layer_norm_gated`."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_choice("FusedLayerNormGated", "activation", activation, _GATES)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.activation = activation
        _parameters(
            self, hidden_size, elementwise_affine, elementwise_affine and bias, device, dtype
        )

    def reset_parameters(self) -> None:
        _reset(self)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        rest = self.activation, residual, prenorm, residual_in_fp32, self.eps
        return layer_norm_gated(x, g, self.weight, self.bias, *rest)


class FusedRMSNormGated(nn.Module):
    """Root mean square norm times a gate, see :func:`rms_norm_gated`."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_choice("FusedRMSNormGated", "activation", activation, _GATES)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.activation = activation
        _parameters(self, hidden_size, elementwise_affine, False, device, dtype)

    def reset_parameters(self) -> None:
        _reset(self)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        rest = self.activation, residual, prenorm, residual_in_fp32, self.eps
        return rms_norm_gated(x, g, self.weight, None, *rest)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """:class:`FusedRMSNormGated` with ``activation="swish"``."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, "swish", device, dtype)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """:class:`FusedLayerNormGated` with ``activation="swish"``."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, "swish", eps, device, dtype)


_GATES = ("swish", "silu", "sigmoid")


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int | None = None,
) -> Normed:
    x, residual = added(op, x, residual, residual_in_fp32)
    if num_groups is None:
        y, h = normed(op, x, weight, bias, residual, eps, is_rms_norm=is_rms_norm)
        return (y, h) if prenorm else y
    require_optional(op, weight=weight, bias=bias)
    h = x if residual is None else (x + residual).to(residual.dtype)
    wide = h.dtype
    for t in (weight, bias):
        wide = wide if t is None else torch.promote_types(wide, t.dtype)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    with errors_of(op):
        y = functional.group_norm(
            h.to(wide), num_groups, weight, bias, eps=eps, center=not is_rms_norm
        ).to(x.dtype)
    return (y, h) if prenorm else y


def _gated(
    op: str,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
    *,
    is_rms_norm: bool,
) -> Normed:
    require_choice(op, "activation", activation, _GATES)
    require_flags(op, prenorm=prenorm)
    require_real(op, x=x, g=g)
    if g.shape != x.shape:
        raise ValueError(
            f"{op}: g must have the shape of x, got g.shape={tuple(g.shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    dtypes = {t.dtype for t in (x, g, weight) if t is not None}
    if is_rms_norm and bias is None and residual is None and not prenorm and len(dtypes) == 1:
        act = "sigmoid" if activation == "sigmoid" else "silu"
        with errors_of(op, gate="g"):
            return functional.rms_norm_gated(x, g, weight, eps=eps, activation=act)
    x, residual = added(op, x, residual, residual_in_fp32)
    wide = torch.promote_types(x.dtype, torch.float32)
    y, h = normed(op, x, weight, bias, residual, eps, is_rms_norm=is_rms_norm, out_dtype=wide)
    gate = widen(g).sigmoid() if activation == "sigmoid" else nnf.silu(widen(g))
    y = (y * gate).to(x.dtype)
    return (y, h) if prenorm else y


def _parameters(
    module: nn.Module,
    size: int,
    weight: bool,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Registers the weight and the bias, or None."""
    ones = nn.Parameter(torch.ones(size, device=device, dtype=dtype)) if weight else None
    zeros = nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) if bias else None
    module.register_parameter("weight", ones)
    module.register_parameter("bias", zeros)


def _reset(module: nn.Module) -> None:
    if isinstance(module.weight, Tensor):
        nn.init.ones_(module.weight)
    if isinstance(module.bias, Tensor):
        nn.init.zeros_(module.bias)


class RMSNormGated(GatedRMSNorm):
    """Computes ``rms_norm(x silu(z))``, or ``rms_norm(x) silu(z)`` with `norm_before_gate`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)


LayerNormGated = GatedLayerNorm
