"""Residual streams of `liger_kernel.transformers`: mHC and attention residuals.

`allow_fp32` has no effect: x may have any floating-point dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import full_precision, require_int, require_number, require_shape
from omniattn.compat._errors import require_real
from omniattn.modules.blocks.residual_streams import sinkhorn
from omniattn.reference.precision import widen

Coefficients = tuple[Tensor, Tensor, Tensor]


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> Coefficients:
    """Computes the weights to read, to write and to mix n streams (Xie et al., arXiv:2512.24880).

    With ``m = norm(x) phi`` of all streams together, split into u (n), v (n) and M (n, n):
    ``h_pre = sigmoid(alpha_pre u + b_u) + pre_eps``, ``h_post = post_mult sigmoid(alpha_post v +
    b_v)``, and h_res from ``alpha_res M + b_M`` by `tmax` normalisations of rows and columns.

    Args:
        x: (..., n, C).
        phi: (n C, n n + 2 n).
        b: (n n + 2 n,).
        alpha_pre, alpha_post, alpha_res: one element each.
        allow_fp32: has no effect.
        tmax: number of normalisations, >= 1.
        rms_eps: added to the mean square of x.
        pre_eps: added to h_pre.
        sinkhorn_eps: added to entries and sums of h_res.
        post_mult: factor of h_post.

    Returns:
        h_pre (..., n), h_post (..., n) and h_res (..., n, n) in float32 (float64 for float64).
    """
    op = "liger_mhc_coeffs"
    require_real(op, x=x, phi=phi, b=b)
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have shape (..., n, C), got x.shape={tuple(x.shape)}")
    streams, width = x.shape[-2:]
    count = streams * (streams + 2)
    require_shape(op, "phi", phi, (streams * width, count))
    require_shape(op, "b", b, (count,))
    require_int(op, "tmax", tmax, 1)
    flat = widen(x).flatten(-2)
    with full_precision(x):
        norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
        mixed = (flat @ phi.to(flat.dtype)) * norm
    sizes = [streams, streams, streams * streams]
    alphas = (alpha_pre, alpha_post, alpha_res)
    factors = [widen(a).reshape(1).expand(n) for a, n in zip(alphas, sizes, strict=True)]
    pre, post, res = (mixed * torch.cat(factors) + b.to(flat.dtype)).split(sizes, -1)
    mix = sinkhorn(res.unflatten(-1, (streams, streams)), tmax, sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, mix


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """Computes ``sum_i h_pre_i x_i`` of x (..., n, C) and h_pre (..., n), of x's dtype."""
    require_real("liger_mhc_pre", x=x, h_pre=h_pre)
    require_shape("liger_mhc_pre", "h_pre", h_pre, tuple(x.shape[:-1]))
    return (widen(h_pre)[..., None] * widen(x)).sum(-2).to(x.dtype)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Computes ``y_o = sum_i h_res_oi x_i + h_post_o f_out``, of the shape and dtype of x.

    x is (..., n, C), f_out (..., C), h_post (..., n) and h_res (..., n, n).
    """
    op = "liger_mhc_post_res"
    require_real(op, x=x, f_out=f_out, h_post=h_post, h_res=h_res)
    require_shape(op, "f_out", f_out, (*x.shape[:-2], x.shape[-1]))
    require_shape(op, "h_post", h_post, tuple(x.shape[:-1]))
    require_shape(op, "h_res", h_res, (*x.shape[:-1], x.shape[-2]))
    with full_precision(x):
        kept = widen(h_res) @ widen(x)
    return (kept + widen(h_post)[..., None] * widen(f_out)[..., None, :]).to(x.dtype)


def liger_mhc_apply(
    x: Tensor,
    f_out: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    *,
    return_x_in: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`liger_mhc_post_res`, with `return_x_in` also :func:`liger_mhc_pre`."""
    out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (out, liger_mhc_pre(x, h_pre)) if return_x_in else out


def liger_mhc_forward(
    x: Tensor,
    layer: Any,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Tensor | tuple[Tensor, Coefficients]:
    """Computes n streams around `layer`, which maps (..., C) to the same shape.

    The other arguments are those of :func:`liger_mhc_coeffs`, whose results are returned, too,
    with `return_coeffs`.
    """
    weights = liger_mhc_coeffs(
        *(x, phi, b, alpha_pre, alpha_post, alpha_res),
        tmax=tmax,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_mult=post_mult,
    )
    inner = liger_mhc_pre(x, weights[0])
    parameter = next(iter(layer.parameters()), None) if isinstance(layer, nn.Module) else None
    out = layer(inner if parameter is None else inner.to(parameter.dtype))
    y = liger_mhc_post_res(x, out, *weights[1:])
    return (y, weights) if return_coeffs else y


class LigerMHC(nn.Module):
    """Layer with n residual streams around it, see :func:`liger_mhc_forward`.

    Args:
        layer: module that maps (..., c) to the same shape.
        hc: number n of streams.
        c: width of a stream.
        tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult: see :func:`liger_mhc_coeffs`.
        phi_dtype: dtype of phi.
        allow_fp32: has no effect.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        require_int("LigerMHC", "hc", hc, 1)
        require_int("LigerMHC", "c", c, 1)
        self.layer, self.hc, self.c, self.tmax = layer, hc, c, tmax
        self.rms_eps, self.pre_eps, self.sinkhorn_eps = rms_eps, pre_eps, sinkhorn_eps
        self.post_mult, self.allow_fp32 = post_mult, allow_fp32
        parameter = next(layer.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        count = hc * (hc + 2)
        phi = 0.02 * torch.randn(hc * c, count, dtype=phi_dtype, device=device)
        self.phi = nn.Parameter(phi)
        self.b = nn.Parameter(torch.zeros(count, device=device))
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            self.register_parameter(name, nn.Parameter(torch.ones((), device=device)))

    def forward(self, x: Tensor) -> Tensor:
        """Maps streams (..., hc, c) to the same shape."""
        require_shape("LigerMHC", "x", x, (*x.shape[:-2], self.hc, self.c))
        found = liger_mhc_forward(
            *(x, self.layer, self.phi, self.b),
            *(self.get_parameter(f"alpha_{name}") for name in ("pre", "post", "res")),
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )
        assert isinstance(found, Tensor)
        return found


def liger_attn_res(
    V: Tensor | list[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """Computes ``sum_n softmax_n(w_query . (w_norm norm(V_n))) V_n`` (Kimi Team, arXiv:2603.15031).

    V is (N, B, T, D) or a list of N tensors (B, T, D), w_query and w_norm are (D,), and the norm is
    a root mean square norm.
    """
    op = "liger_attn_res"
    if isinstance(V, (list, tuple)):
        V = torch.stack(list(V))
    require_real(op, V=V, w_query=w_query, w_norm=w_norm)
    require_shape(op, "w_query", w_query, tuple(V.shape[-1:]))
    require_shape(op, "w_norm", w_norm, tuple(V.shape[-1:]))
    require_number(op, "eps", eps, 0.0)
    wide = widen(V)
    norm = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    keys = widen((wide * norm).to(V.dtype) * w_norm)
    shares = (keys * widen(w_query)).sum(-1, keepdim=True).softmax(0)
    return (shares * wide).sum(0).to(V.dtype)
