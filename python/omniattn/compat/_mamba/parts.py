"""mamba-ssm's norms, activation and other forms of its scans."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_int, require_number, require_shape
from omniattn.compat._errors import (
    errors_as,
    errors_of,
    require_flags,
    require_form,
    require_optional,
    require_real,
)
from omniattn.compat._mamba.scan import selective_scan_fn
from omniattn.compat._mamba.ssd import mamba_chunk_scan_combined
from omniattn.compat._norms import norm_fn, normed
from omniattn.reference.precision import widen

Normed = Tensor | tuple[Tensor, ...]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """Computes the norm of h = dropout(rowscale * x) + dropout(x1) + residual.

    Args:
        x: (..., N).
        weight, bias: (N,); the bias may be None.
        residual, x1: of the shape of x, or None.
        weight1, bias1: (N,) of a second norm of h, or None.
        eps: added to the variance.
        dropout_p: probability of dropping an element of x or x1.
        rowscale: (...), a factor of each row.
        prenorm: if True, also returns h.
        residual_in_fp32: if True, h is fp32 even if there is no residual.
        is_rms_norm: if True, computes a root mean square norm.
        return_dropout_mask: not supported.

    Returns:
        y, or (y, h), or with `weight1` (y, y1) or (y, y1, h).
    """
    return norm_fn(
        "layer_norm_fn",
        x,
        (weight, bias),
        residual,
        x1,
        (weight1, bias1),
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Normed:
    """Computes :func:`layer_norm_fn` with ``is_rms_norm=True``."""
    return norm_fn(
        "rms_norm_fn",
        x,
        (weight, bias),
        residual,
        x1,
        (weight1, bias1),
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm=True,
        return_dropout_mask=return_dropout_mask,
    )


class RMSNorm(nn.Module):
    """Root mean square norm of a sum: `mamba_ssm.ops.triton.layer_norm.RMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_number("RMSNorm", "dropout_p", dropout_p, 0.0, below=1.0)
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normed:
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Computes ``norm(x) silu(z)``, or ``norm(x silu(z))``.

    Args:
        x: (..., N).
        weight, bias: (N,); the bias may be None.
        z: of the shape of x, or None for no gate.
        eps: added to the variance.
        group_size: number of channels that are normalized together; None for N.
        norm_before_gate: True if the gate multiplies the result, False for the input.
        is_rms_norm: if True, computes a root mean square norm.

    Returns:
        y of the shape and dtype of x.
    """
    rest = x, weight, bias, z, eps, group_size, norm_before_gate
    return _gated("layernorm_fn", *rest, is_rms_norm=is_rms_norm)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Computes :func:`layernorm_fn` with ``is_rms_norm=True``."""
    rest = x, weight, bias, z, eps, group_size, norm_before_gate
    return _gated("rmsnorm_fn", *rest, is_rms_norm=True)


class GatedRMSNorm(nn.Module):
    """Root mean square norm with a gate: `mamba_ssm.ops.triton.layernorm_gated.RMSNorm`."""

    _is_rms_norm = True
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        zeros = None if self._is_rms_norm else nn.Parameter(torch.zeros_like(self.weight))
        self.register_parameter("bias", zeros)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        rest = z, self.eps, self.group_size, self.norm_before_gate, self._is_rms_norm
        return layernorm_fn(x, self.weight, self.bias, *rest)


class GatedLayerNorm(GatedRMSNorm):
    """Layer norm with a gate: `mamba_ssm.ops.triton.layernorm_gated.LayerNorm`."""

    _is_rms_norm = False


def swiglu(xy: Tensor) -> Tensor:
    """Computes ``silu(x) y`` of the halves x and y of the last dimension."""
    require_real("swiglu", xy=xy)
    return functional.swiglu(*xy.chunk(2, -1))


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Computes y of :func:`mamba_chunk_scan_combined`."""
    with errors_as("mamba_chunk_scan", "mamba_chunk_scan_combined"):
        y: Tensor = mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus
        )
    return y


def ssd_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Computes Mamba-2's scan, whose rates may differ for each channel, as a selective scan.

    Args:
        x: (batch, T, H, P).
        dt: (batch, T, H), or (batch, T, H, P).
        A: (H,), or (H P, N).
        B, C: (batch, T, G, N).
        D: (H,) or (H, P), or None.
        z: (batch, T, H, P), or None.
        dt_bias: (H,) or (H, P), or None.
        dt_softplus: if True, dt becomes softplus(dt + dt_bias).
        dt_limit: smallest and largest dt.

    Returns:
        y (batch, T, H, P).
    """
    op = "ssd_selective_scan"
    require_real(op, x=x, dt=dt, A=A, B=B, C=C)
    require_optional(op, D=D, z=z, dt_bias=dt_bias)
    require_form(op, "x", x, "batch, T, H, P")
    require_form(op, "B", B, "batch, T, G, N")
    require_form(op, "C", C, "batch, T, G, N")
    require_flags(op, dt_softplus=dt_softplus)
    heads, width = x.shape[2:]

    def channels(name: str, t: Tensor | None, places: tuple[int, ...] = ()) -> Tensor | None:
        """Returns one value for each channel of the heads."""
        if t is None:
            return None
        if t.ndim == len(places) + 1:
            t = t[..., None].expand(*t.shape, width)
        require_shape(op, name, t, (*places, heads, width))
        return t.flatten(-2)

    steps, gate = channels("dt", dt, tuple(x.shape[:2])), channels("z", z, tuple(x.shape[:2]))
    assert steps is not None
    bias = channels("dt_bias", dt_bias)
    if A.ndim == 1:
        require_shape(op, "A", A, (heads,))
        A = A.repeat_interleave(width)[:, None].expand(-1, B.shape[-1])
    if tuple(dt_limit) != (0.0, math.inf):
        steps = widen(steps)
        steps = steps if bias is None else steps + bias
        steps = nnf.softplus(steps) if dt_softplus else steps
        steps = steps.clamp(*dt_limit).to(x.dtype)
        bias, dt_softplus = None, False
    with errors_as(op, "selective_scan_fn"):
        y = selective_scan_fn(
            x.flatten(2).mT,
            steps.mT,
            widen(A),
            B.permute(0, 2, 3, 1),
            C.permute(0, 2, 3, 1),
            channels("D", D),
            None if gate is None else gate.mT,
            bias,
            dt_softplus,
        )
    assert isinstance(y, Tensor)
    return y.mT.view(x.shape)


def _gated(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    *,
    is_rms_norm: bool,
) -> Tensor:
    require_real(op, x=x, weight=weight)
    require_optional(op, bias=bias, z=z)
    require_flags(op, norm_before_gate=norm_before_gate, is_rms_norm=is_rms_norm)
    channels = x.shape[-1]
    size = channels if group_size is None else group_size
    require_int(op, "group_size", size, 1)
    if channels % size:
        raise ValueError(f"{op}: group_size must divide {channels}, got {group_size=}")
    if z is not None:
        require_shape(op, "z", z, tuple(x.shape))
        if is_rms_norm and bias is None and x.dtype == weight.dtype == z.dtype:
            with errors_of(op, gate="z"):
                return functional.rms_norm_gated(
                    x,
                    z,
                    weight,
                    eps=eps,
                    norm_before_gate=norm_before_gate,
                    num_groups=channels // size,
                )
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if z is not None and not norm_before_gate:
        h = h * nnf.silu(z.to(wide))
    if size == channels:
        y, _ = normed(op, h, weight, bias, None, eps, is_rms_norm=is_rms_norm)
    else:
        with errors_of(op):
            y = functional.group_norm(
                h,
                channels // size,
                weight.to(wide),
                None if bias is None else bias.to(wide),
                eps=eps,
                center=not is_rms_norm,
            )
    if z is not None and norm_before_gate:
        y = y * nnf.silu(z.to(wide))
    return y.to(x.dtype)
