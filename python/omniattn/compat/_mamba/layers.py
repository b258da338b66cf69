"""mamba-ssm's fused Mamba and Mamba-2 layers without the input projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_device, require_int, require_shape, shown
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_form,
    require_index,
    require_numbers,
    require_optional,
    require_real,
    require_state_dtype,
)
from omniattn.compat._mamba.scan import of_pairs, require_same_groups, scan, steps_first
from omniattn.compat._mamba.ssd import final_states, scan_rows
from omniattn.compat.causal_conv1d import convolved

__all__ = ["mamba_inner_fn", "mamba_split_conv1d_scan_combined"]

#: Dimensions of x_proj_weight, delta_proj_weight, out_proj_weight and A.
_FORMS = ("M, D", "D, R", "E, D", "D, N")


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Computes a Mamba layer after the input projection: convolution, scan, output projection.

    With the halves ``x, z = xz`` and ``u = silu(conv1d(x))``:
    ``r, B, C = x_proj_weight u + (0, B_proj_bias, C_proj_bias)``, ``delta = delta_proj_weight r``,
    ``y = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus)``,
    ``out = out_proj_weight y + out_proj_bias``.

    Args:
        xz: (B, 2 D, T), floating-point.
        conv1d_weight: (D, 1, K), like conv1d_bias of any floating-point dtype.
        conv1d_bias: (D,), or None.
        x_proj_weight: (R + M + M, D) of xz's dtype, without the M rows of a B or C that is given.
            M is N, or 2 N with a complex A: interleaved real and imaginary parts.
        delta_proj_weight: (D, R) of xz's dtype.
        out_proj_weight: (E, D) of xz's dtype.
        out_proj_bias: (E,) of xz's dtype, or None.
        A, B, C, D, delta_bias, delta_softplus: as in `selective_scan_fn`.
        B_proj_bias, C_proj_bias: (M,), only without B and C.
        checkpoint_lvl: 0 or 1, the recomputation level of mamba-ssm; has no effect here.
        b_rms_weight, c_rms_weight: (N,), weights of RMS norms of B and C, with a real A and one
            group.
        dt_rms_weight: (D,), weight of an RMS norm of delta.
        b_c_dt_rms_eps: eps of these norms.

    Returns:
        out (B, T, E) of xz's dtype. Under autocast the products and out have autocast's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or values do not match.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients flow to all tensors; in mamba-ssm they do not flow through the norms.

    Reference:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023,
        arXiv:2312.00752.

    Example:
        >>> one = torch.ones(1, 1)
        >>> mamba_inner_fn(one.expand(1, 2, 3), one[None], None, one.expand(3, 1), *[one] * 2, None,
        ...                -one, delta_softplus=False).flatten()
        tensor([0.2088, 0.3093, 0.3577])
    """
    op = "mamba_inner_fn"
    norms = {"b_rms_weight": b_rms_weight, "c_rms_weight": c_rms_weight}
    norms |= {"dt_rms_weight": dt_rms_weight}
    biases = {"B_proj_bias": B_proj_bias, "C_proj_bias": C_proj_bias}
    require_optional(op, **norms, **biases)
    require_int(op, "checkpoint_lvl", checkpoint_lvl, 0, 1)
    weights = {"x_proj_weight": x_proj_weight, "delta_proj_weight": delta_proj_weight}
    weights |= {"out_proj_weight": out_proj_weight}
    states = _require_inner(op, xz, conv1d_weight, weights, A, B, C)
    x, z = xz.mT.chunk(2, -1)
    names = {"x": "xz", "weight": "conv1d_weight", "bias": "conv1d_bias"}
    u = convolved(op, x, conv1d_weight[:, 0], conv1d_bias, None, "silu", names)
    rank = delta_proj_weight.shape[1]
    with errors_of(op, x="xz", weight="x_proj_weight"):
        parts = functional.linear(u, x_proj_weight)
    with errors_of(op, x="xz", weight="delta_proj_weight"):
        delta = functional.linear(parts[..., :rank], delta_proj_weight)
    B = _rows(op, "B", B, parts[..., rank : rank + states], B_proj_bias, xz, A)
    C = _rows(op, "C", C, parts[..., parts.shape[-1] - states :], C_proj_bias, xz, A)
    B = _normed(op, "b_rms_weight", B, b_rms_weight, b_c_dt_rms_eps)
    C = _normed(op, "c_rms_weight", C, c_rms_weight, b_c_dt_rms_eps)
    delta = _normed(op, "dt_rms_weight", delta, dt_rms_weight, b_c_dt_rms_eps)
    require_same_groups(op, B, C)
    with errors_of(op, u="xz"):
        y, _ = scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, None, None)
    with errors_of(op, x="xz", weight="out_proj_weight", bias="out_proj_bias"):
        return functional.linear(y, out_proj_weight, out_proj_bias)


def _require_inner(
    op: str,
    xz: Tensor,
    conv1d_weight: Tensor,
    weights: dict[str, Tensor],
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
) -> int:
    """Checks shapes of tensors that `mamba_inner_fn` splits, multiplies, transposes; returns M."""
    require_real(op, xz=xz, conv1d_weight=conv1d_weight, **weights)
    require_numbers(op, A=A, **({} if B is None else {"B": B}), **({} if C is None else {"C": C}))
    require_form(op, "xz", xz, "B, 2 D, T")
    require_form(op, "conv1d_weight", conv1d_weight, "D, 1, K")
    for name, t, form in zip((*weights, "A"), (*weights.values(), A), _FORMS, strict=True):
        require_form(op, name, t, form)
    channels, odd = divmod(xz.shape[1], 2)
    if odd:
        raise ValueError(f"{op}: xz must have 2 D channels, got xz.shape={tuple(xz.shape)}")
    of_x, of_delta, of_out = weights.values()
    states = A.shape[1] * (2 if A.is_complex() else 1)
    rows = of_delta.shape[1] + states * ((B is None) + (C is None))
    require_shape(op, "A", A, (channels, A.shape[1]))
    require_shape(op, "conv1d_weight", conv1d_weight, (channels, 1, conv1d_weight.shape[2]))
    require_shape(op, "delta_proj_weight", of_delta, (channels, of_delta.shape[1]))
    require_shape(op, "x_proj_weight", of_x, (rows, channels))
    require_shape(op, "out_proj_weight", of_out, (len(of_out), channels))
    return states


def _rows(
    op: str,
    name: str,
    given: Tensor | None,
    part: Tensor,
    bias: Tensor | None,
    xz: Tensor,
    A: Tensor,
) -> Tensor:
    """Returns B or C (`name`) for `scan`: the given one, or `part` (B, T, M) of the projection."""
    if given is not None and bias is not None:
        raise ValueError(
            f"{op}: {name}_proj_bias must be None where {name} is given, got "
            f"{name}_proj_bias.shape={tuple(bias.shape)}"
        )
    if given is not None:
        return steps_first(op, name, given, xz.chunk(2, 1)[0], A)
    if bias is not None:
        require_shape(op, f"{name}_proj_bias", bias, (part.shape[-1],))
        require_device(op, f"{name}_proj_bias", bias, xz, "xz")
        part = part + bias.to(part.dtype)
    return of_pairs(part) if A.is_complex() else part


def _normed(op: str, name: str, rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Computes an RMS norm of rows (B, T, N) or (B, T, 1, N) in the wider dtype, if weighted."""
    if weight is None:
        return rows
    if rows.is_complex() or rows.ndim < 3 or (rows.ndim == 4 and rows.shape[2] != 1):
        raise ValueError(
            f"{op}: {name} must be None unless A is real and B and C have steps and one group, got "
            f"{name}.shape={tuple(weight.shape)}"
        )
    require_shape(op, name, weight, (rows.shape[-1],))
    dtype = torch.promote_types(rows.dtype, weight.dtype)
    with errors_of(op, x="xz", weight=name, eps="b_c_dt_rms_eps"):
        return functional.rms_norm(rows.to(dtype), weight.to(dtype), eps=eps).to(rows.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a Mamba-2 layer after the input projection.

    The parts are convolution, scan, gate or gated norm, and output projection.

    With the parts ``g, u, z, xBC, dt = zxbcdt`` and ``x, B, C = act(conv1d(xBC))``:
    ``y = mamba_chunk_scan_combined(x, dt, A, B, C, D, z, dt_bias, dt_softplus=True)``; with
    rmsnorm_weight y is computed without z, and then
    ``y = RMSNorm(y) rmsnorm_weight silu(z)``, or ``RMSNorm(y silu(z)) rmsnorm_weight``;
    ``out = outproj_weight (silu(g) u, y) + outproj_bias``, or, without it, ``(silu(g) u, y)``.

    Args:
        zxbcdt: (B, T, 2 M + 2 H P + 2 G N + H), floating-point. The first 2 M columns, if any, are
            g and u, which Mamba-2 itself does not have.
        conv1d_weight: (H P + 2 G N, K), like conv1d_bias of any floating-point dtype.
        conv1d_bias: (H P + 2 G N,), or None.
        dt_bias: (H,), floating-point.
        A: (H,), floating-point, at most 0.
        D: (H, P), or (H,) with `headdim`; floating-point.
        chunk_size: chunk size of mamba-ssm's kernels; has no effect.
        initial_states, seq_idx, dt_limit, state_dtype: of `mamba_chunk_scan_combined`; the
            convolution also restarts from zeros in each sequence of seq_idx.
        return_final_states: if True, returns (out, final states) instead of out.
        activation: activation of the convolution: None, "silu" or "swish".
        rmsnorm_weight: (H P,), floating-point: weight of the norm of each of the G parts of a row.
        rmsnorm_eps: eps of this norm.
        outproj_weight: (E, M + H P) of zxbcdt's dtype.
        outproj_bias: (E,) of zxbcdt's dtype, with outproj_weight.
        headdim: P.
        ngroups: G, which divides H.
        norm_before_gate: True if the gate multiplies the norm's output, False for its input.

    Returns:
        out (B, T, E), or (B, T, M + H P) without outproj_weight, of zxbcdt's dtype; and the final
        states (B, H, P, N) in fp32 (fp64 for fp64) or state_dtype, if requested. Under autocast the
        output projection and out have the dtype of autocast.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or values do not match.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients flow to all tensors, from out and from the final states.

    Reference:
        Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060.

    Example:
        >>> one = torch.ones(1)
        >>> given = torch.ones(1, 3, 5), torch.ones(3, 1), None, one, -one, one, 64
        >>> mamba_split_conv1d_scan_combined(*given, headdim=1).shape
        torch.Size([1, 3, 1])
    """
    op = "mamba_split_conv1d_scan_combined"
    require_flags(op, return_final_states=return_final_states, norm_before_gate=norm_before_gate)
    require_int(op, "chunk_size", chunk_size, 1)
    require_state_dtype(op, state_dtype)
    given = {"zxbcdt": zxbcdt, "conv1d_weight": conv1d_weight, "dt_bias": dt_bias, "A": A, "D": D}
    require_real(op, **given)
    heads, size, states, mlp = _sizes(op, zxbcdt, conv1d_weight, D, headdim, ngroups)
    inner, rows = heads * size, ngroups * states
    if seq_idx is not None:
        require_index(op, "seq_idx", seq_idx, tuple(zxbcdt.shape[:2]), zxbcdt, "zxbcdt")
    gated, z, xbc, dt = zxbcdt.split([2 * mlp, inner, inner + 2 * rows, heads], -1)
    names = {"x": "zxbcdt", "weight": "conv1d_weight", "bias": "conv1d_bias"}
    xbc = convolved(op, xbc, conv1d_weight, conv1d_bias, seq_idx, activation, names)
    x, B, C = xbc.split([inner, rows, rows], -1)
    tensors = {
        **{"x": x.unflatten(-1, (heads, size)), "dt": dt, "A": A},
        **{"B": B.unflatten(-1, (ngroups, states)), "C": C.unflatten(-1, (ngroups, states))},
        "z": z.unflatten(-1, (heads, size)) if rmsnorm_weight is None else None,
    }
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
    y, kept, bounds = scan_rows(op, tensors, seq_idx, initial_states, options, "zxbcdt")
    out = y.flatten(2)
    if rmsnorm_weight is not None:
        out = _gated_norm(op, out, z, rmsnorm_weight, rmsnorm_eps, norm_before_gate, ngroups)
    if mlp > 0:
        out = torch.cat((functional.swiglu(gated), out), -1)
    out = _last_product(op, out, outproj_weight, outproj_bias)
    if not return_final_states:
        return out
    kept = final_states(kept, bounds, zxbcdt)
    return out, kept.to(state_dtype or kept.dtype)


def _sizes(
    op: str,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    D: Tensor,
    headdim: int | None,
    ngroups: int,
) -> tuple[int, int, int, int]:
    """Returns H, P, N and M of `mamba_split_conv1d_scan_combined`."""
    require_form(op, "zxbcdt", zxbcdt, "B, T, width")
    require_form(op, "conv1d_weight", conv1d_weight, "H P + 2 G N, K")
    require_int(op, "ngroups", ngroups, 1)
    if headdim is not None:
        require_int(op, "headdim", headdim, 1)
    size = D.shape[1] if D.ndim == 2 else headdim
    if D.ndim not in (1, 2) or size is None or headdim not in (None, size):
        raise ValueError(
            f"{op}: D must have shape (H, P), or (H,) with headdim=P, got D.shape="
            f"{tuple(D.shape)}, {headdim=}"
        )
    heads = len(D)
    if heads % ngroups:
        raise ValueError(f"{op}: ngroups must divide H, got {ngroups=}, D.shape={tuple(D.shape)}")
    states, rest = divmod(len(conv1d_weight) - heads * size, 2 * ngroups)
    if states < 0 or rest:
        raise ValueError(
            f"{op}: conv1d_weight must have H P + 2 G N rows, got conv1d_weight.shape="
            f"{tuple(conv1d_weight.shape)}, H={heads}, P={size}, G={ngroups}"
        )
    needed = len(conv1d_weight) + heads * size + heads
    mlp, rest = divmod(zxbcdt.shape[2] - needed, 2)
    if mlp < 0 or rest:
        raise ValueError(
            f"{op}: zxbcdt must have 2 M + 2 H P + 2 G N + H columns, got zxbcdt.shape="
            f"{tuple(zxbcdt.shape)}, H={heads}, P={size}, G={ngroups}, N={states}"
        )
    return heads, size, states, mlp


def _gated_norm(
    op: str, y: Tensor, z: Tensor, weight: Tensor, eps: float, before_gate: bool, groups: int
) -> Tensor:
    """Computes a gated RMS norm in the wider dtype of y and the weight."""
    require_real(op, rmsnorm_weight=weight)
    require_shape(op, "rmsnorm_weight", weight, (y.shape[-1],))
    dtype = torch.promote_types(y.dtype, weight.dtype)
    with errors_of(op, x="zxbcdt", weight="rmsnorm_weight", eps="rmsnorm_eps"):
        return functional.rms_norm_gated(
            *(t.to(dtype) for t in (y, z, weight)),
            eps=eps,
            norm_before_gate=before_gate,
            num_groups=groups,
        ).to(y.dtype)


def _last_product(op: str, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None:
        if bias is not None:
            raise ValueError(
                f"{op}: outproj_bias must be None without outproj_weight, got "
                f"outproj_bias={shown(bias)}"
            )
        return out
    require_real(op, outproj_weight=weight)
    require_form(op, "outproj_weight", weight, "E, M + H P")
    require_shape(op, "outproj_weight", weight, (len(weight), out.shape[-1]))
    with errors_of(op, x="zxbcdt", weight="outproj_weight", bias="outproj_bias"):
        return functional.linear(out, weight, bias)
