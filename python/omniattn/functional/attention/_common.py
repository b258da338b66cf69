"""Tensor checks shared by all attention functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from omniattn.checks.arguments import (
    autocast_dtype,
    is_one_of,
    refuse_nested,
    require_device,
    require_float,
    require_like,
    require_one_shape,
    require_shape,
    require_strided,
    shown,
)
from omniattn.checks.packed import require_all_tokens
from omniattn.functional.masks import Mask, SlidingWindow
from omniattn.ops.dispatch.plain import any_dual
from omniattn.ops.dispatch.ranks import require_whole
from omniattn.reference.precision import compute_dtype
from omniattn.reference.values import require_all_rows

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

LONGEST = 2**40 - 1  # below kMaskParamLimit of csrc/semantics/mask.h


def autocast(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks q, k and v and casts them to one dtype; `names` are the caller's names."""
    q_name, k_name, v_name = names
    require_whole(op)
    require_float(op, q_name, q)
    dtype = autocast_dtype(q)
    if dtype is not None:
        require_float(op, k_name, k)
        require_float(op, v_name, v)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    require_like(op, k_name, k, q, q_name)
    require_like(op, v_name, v, q, q_name)
    return q, k, v


def check_shapes(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    paged: bool = False,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> tuple[int, int, int, int]:
    """Checks q, k and v; returns (B, Hq, Tq, Tk)."""
    q_name, k_name, v_name = names
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        _refuse_dimensions(op, zip(names, (q_shape, k_shape, v_shape), strict=True))
    batch, tq, heads, dim = q_shape
    k_batch, tk, kv_heads, k_dim = k_shape
    v_batch, v_tk, v_heads, _ = v_shape
    if (k_batch != batch and not paged) or k_dim != dim:
        raise ValueError(
            f"{op}: {q_name} and {k_name} must have the same B and D, got "
            f"{q_name}.shape={tuple(q_shape)}, {k_name}.shape={tuple(k_shape)}"
        )
    if v_batch != k_batch or v_tk != tk or v_heads != kv_heads:
        raise ValueError(
            f"{op}: {k_name} and {v_name} must have the same B, Tk and Hkv, got "
            f"{k_name}.shape={tuple(k_shape)}, {v_name}.shape={tuple(v_shape)}"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(f"{op}: Hq must be a multiple of Hkv, got Hq={heads}, Hkv={kv_heads}")
    return batch, heads, tq, tk


def refuse_gradients(op: str, *tensors: Tensor) -> None:
    """Raises if a gradient or tangent would pass through an op without derivatives."""
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if needed or (forward_ad._current_level >= 0 and any_dual(tensors)):
        raise RuntimeError(
            f"{op}: supports inference only and has no gradient, wrap the call in torch.no_grad()"
        )


def _refuse_dimensions(op: str, shapes: Iterable[tuple[str, Sequence[int]]]) -> NoReturn:
    """Raises for the first of q, k and v, given by name and shape, without four dimensions."""
    layouts = ("(B, Tq, Hq, D)", "(B, Tk, Hkv, D)", "(B, Tk, Hkv, Dv)")
    name, shape, layout = next(
        (name, tuple(shape), layout)
        for (name, shape), layout in zip(shapes, layouts, strict=True)
        if len(shape) != 4
    )
    raise ValueError(f"{op}: {name} must have 4 dimensions {layout}, got {name}.shape={shape}")


def full_shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Returns (B, Hq, Tq, Tk)."""
    return (q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def causal_mask(op: str, name: str, bias: CausalBias, full: tuple[int, ...]) -> Mask:
    """Returns the mask for a CausalBias, torch's mask tensor without values."""
    from torch.nn.attention.bias import CausalVariant

    size = (bias.seq_len_q, bias.seq_len_kv)
    if size != full[-2:]:
        raise ValueError(
            f"{op}: {name} must be made for (Tq, Tk)={full[-2:]}, got {name}=CausalBias of {size}"
        )
    return SlidingWindow(-1, 0, top_left=bias.variant == CausalVariant.UPPER_LEFT)


def require_broadcastable(
    op: str, name: str, t: Tensor, q: Tensor, full: tuple[int, ...], q_name: str = "q"
) -> None:
    require_device(op, name, t, q, q_name)
    fits = t.dim() <= len(full) and all(
        is_one_of(n, 1, m) for n, m in zip(reversed(t.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{op}: {name} must be broadcastable to (..., Hq, Tq, Tk)={full}"
            f"{mask_of_keys(t, full)}, got {name}.shape={tuple(t.shape)}"
        )


def mask_of_keys(t: Tensor, full: tuple[int, ...]) -> str:
    """Returns an error's advice: how to pass a mask or bias per key or per sequence."""
    batch, _, tq, tk = full[-4:] if len(full) >= 4 else (0, 0, 0, 0)
    shape = tuple(t.shape)
    if shape in ((batch, tk), (batch, 1, tk)):
        if t.dtype == torch.bool:
            return "; a mask of the keys that are no padding, (B, Tk), is masks.KeyPadding(mask)"
        return "; a bias of keys (B, Tk) is bias[:, None, None]"
    if shape == (batch, tq, tk):
        return "; one without heads, (B, Tq, Tk), needs a dimension for them, as by [:, None]"
    return ""


def four_dims(t: Tensor, full: tuple[int, ...]) -> Tensor:
    """Returns a view of t with four dimensions; all except the last may still broadcast."""
    t = t[(None,) * (4 - t.dim())]
    return t if t.shape[3] == full[3] else t.expand(*t.shape[:3], full[3])


def require_bias(op: str, name: str, bias: Tensor, q: Tensor, q_name: str = "q") -> None:
    require_float(op, name, bias)
    require_strided(op, name, bias)
    widest = compute_dtype(q)
    if bias.dtype != q.dtype and bias.dtype != torch.float32 and widest != torch.float32:
        raise TypeError(
            f"{op}: {name} must be float64 or float32 for float64 inputs, "
            f"got {name}.dtype={bias.dtype}"
        )
    if bias.dtype == torch.float64 and widest != torch.float64:
        raise TypeError(
            f"{op}: {name} must not be float64 unless {q_name} is, got {name}.dtype={bias.dtype}, "
            f"{q_name}.dtype={q.dtype}"
        )


def require_parameter(
    op: str, name: str, t: Tensor, q: Tensor, shapes: list[tuple[int, ...]]
) -> None:
    require_float(op, name, t)
    require_strided(op, name, t)
    if t.device != q.device:
        raise ValueError(
            f"{op}: {name} must be on the device of q, got {name}.device={t.device}, "
            f"q.device={q.device}"
        )
    require_one_shape(op, name, t, shapes)


def require_lse(op: str, lse: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    """Requires `lse` as returned by `attention` for q."""
    require_float(op, "lse", lse)
    widest = compute_dtype(q)
    if lse.dtype != widest or lse.device != q.device:
        raise TypeError(
            f"{op}: lse must be {widest} on the device of q, got lse.dtype={lse.dtype}, "
            f"lse.device={lse.device}, q.device={q.device}"
        )
    require_shape(op, "lse", lse, shape)


def require_int32_or_int64(op: str, name: str, t: Tensor, q: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be an int32 or int64 tensor, got {name}={shown(t)}")
    if t.is_nested:
        refuse_nested(op, name, t)
    require_strided(op, name, t)
    require_device(op, name, t, q, "q")


def require_sequences(op: str, cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Requires boundaries (N + 1,) of sequences packed along T of q and k, with B = 1."""
    require_int32_or_int64(op, "cu_seqlens", cu_seqlens, q)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or q.shape[0] != 1:
        raise ValueError(
            f"{op}: cu_seqlens must have shape (N + 1,), and q B = 1, "
            f"got cu_seqlens.shape={tuple(cu_seqlens.shape)}, q.shape={tuple(q.shape)}"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{op}: Tq must be Tk with cu_seqlens, got Tq={q.shape[1]}, Tk={k.shape[1]}"
        )
    if not require_all_tokens(op, cu_seqlens, q.shape[1]):
        require_all_rows(op, cu_seqlens, q.shape[1])
