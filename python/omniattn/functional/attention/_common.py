"""Shared by all attention functions: check and encode options, call the op."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    autocast_dtype,
    implementation,
    is_causal_bias,
    is_one_of,
    refuse_nested,
    require_bool,
    require_choice,
    require_device,
    require_float,
    require_like,
    require_number,
    require_one_shape,
    require_pair,
    require_seed,
    require_shape,
    require_strided,
    shown,
)
from omniattn.encoding.attention import Codes, encode
from omniattn.encoding.masks import BLOCK, MAX_RULES, MaskKind, Rule, Sizes
from omniattn.encoding.options import (
    NORMALIZERS,
    TRANSFORMS,
    Options,
    ScoreKind,
    ScoreRule,
    transform_of,
)
from omniattn.functional.masks import All, BoolMask, Mask, SlidingWindow
from omniattn.functional.masks.computed import Computed
from omniattn.functional.scores import DistanceRows, RelativeBias
from omniattn.functional.scores.score_mod import encode_score_mod
from omniattn.ops import attention as ops
from omniattn.reference.attention import default_scale
from omniattn.reference.precision import compute_dtype

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_LARGEST_FACTOR = torch.finfo(torch.float32).max / 2  # finite times log2(e)
LONGEST = 2**40 - 1  # below kMaskParamLimit of csrc/semantics/mask.h


def autocast(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one dtype, checked; `names` are the caller's names for them."""
    q_name, k_name, v_name = names
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
) -> None:
    q_name, k_name, v_name = names
    for name, t, layout in (
        (q_name, q, "(B, Tq, Hq, D)"),
        (k_name, k, "(B, Tk, Hkv, D)"),
        (v_name, v, "(B, Tk, Hkv, Dv)"),
    ):
        if t.dim() != 4:
            raise ValueError(
                f"{op}: {name} must have 4 dimensions {layout}, got {name}.shape={tuple(t.shape)}"
            )
    if (k.shape[0] != q.shape[0] and not paged) or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: {q_name} and {k_name} must have the same B and D, got "
            f"{q_name}.shape={tuple(q.shape)}, {k_name}.shape={tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{op}: {k_name} and {v_name} must have the same B, Tk and Hkv, got "
            f"{k_name}.shape={tuple(k.shape)}, {v_name}.shape={tuple(v.shape)}"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(f"{op}: Hq must be a multiple of Hkv, got Hq={heads}, Hkv={kv_heads}")


def full_shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """(B, Hq, Tq, Tk)."""
    return (q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    full: tuple[int, ...],
    options: Options,
    return_lse: bool,
    backend: str | None,
    layout: Rule | None = None,
) -> tuple[Tensor, Tensor]:
    """O and lse of a call of shape (B, Hq, Tq, Tk) `full`."""
    codes = checked_codes(op, q, full, options, layout)
    require_bool(op, "return_lse", return_lse)
    if return_lse and options.normalizer != "softmax":
        raise ValueError(
            f"{op}: return_lse needs softmax, got normalizer={shown(options.normalizer)}"
        )
    seed = require_seed(op, options.seed, q) if options.dropout_p > 0 else None
    attend = implementation(op, backend, q, ops.attention)
    aux, mask, score, params = codes
    out, lse = attend(q, k, v, aux, seed, mask, score, params)
    return out, lse


def checked_codes(
    op: str, q: Tensor, full: tuple[int, ...], options: Options, layout: Rule | None = None
) -> Codes:
    """The options as the op takes them."""
    if options.scale is not None:
        require_number(op, "scale", options.scale)
    for name in TRANSFORMS:
        require_number(op, name, getattr(options, name), 0)
    require_number(op, "dropout_p", options.dropout_p, 0, 1)
    scale = default_scale(q.shape[3]) if options.scale is None else options.scale
    name, c = transform_of(options) or ("softcap", 0.0)
    # The factors of the kernels (semantics/score.h), which 0 times infinity would make NaN.
    factor = abs(scale) / c if c else abs(scale)
    if q.dtype != torch.float64 and not max(factor, c) < _LARGEST_FACTOR:
        raise ValueError(
            f"{op}: scale, {name} and scale / {name} must be below {_LARGEST_FACTOR:.2g} "
            f"unless q is float64, got scale={scale}, {name}={c}"
        )
    rules = _mask(op, options, q, full, layout)
    if layout is not None:
        rules = [layout, *rules]
    if len(rules) > MAX_RULES:
        raise ValueError(
            f"{op}: mask must have at most {MAX_RULES} rules joined by &, counting causal, "
            "window_size and packed or cached sequences (~(~a | ~b) joins a and b to one), "
            f"got {len(rules)} rules of mask={shown(options.mask)}"
        )
    program = None
    if options.score_mod is not None:
        program = encode_score_mod(op, options.score_mod, q, full, layout)
    return encode(rules, _scores(op, options, q, full), scale, options.dropout_p, program)


def _mask(
    op: str, options: Options, q: Tensor, full: tuple[int, ...], layout: Rule | None
) -> list[Rule]:
    """All rules of a call, checked."""
    require_bool(op, "causal", options.causal)
    require_pair(op, "window_size", options.window_size, -1, LONGEST)
    (left, right), mask = options.window_size, options.mask
    found: list[Mask] = []
    if options.causal or left >= 0 or right >= 0:
        found.append(SlidingWindow(left, 0 if options.causal else right))
    if is_causal_bias(mask):
        found.append(causal_mask(op, "mask", mask, full))
    elif isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{op}: mask must be bool, True = attend (additive masks go to bias"
                f"{_mask_of_keys(mask.bool(), full)}), "
                f"got mask.dtype={mask.dtype}, mask.shape={tuple(mask.shape)}"
            )
        found.append(BoolMask(mask))
    elif isinstance(mask, Mask):
        found.append(mask)
    elif mask is not None:
        raise TypeError(
            f"{op}: mask must be a Tensor or a Mask{_hint(mask)}, got mask={shown(mask)}"
        )
    sizes = Sizes(full[2], full[3], q.device, full[1])
    if layout is None:
        for each in found:
            _check_parts(op, each, sizes, q, full)
    rules = All(tuple(found)).rules_of_call(sizes, layout)
    if any(type(n) is int and abs(n) > LONGEST for _, *numbers, _ in rules for n in numbers):
        raise ValueError(
            f"{op}: numbers of a mask must be at most {LONGEST}, got mask={shown(mask)}"
        )
    return _checked(op, rules, q, full)


def _checked(op: str, rules: list[Rule], q: Tensor, full: tuple[int, ...]) -> list[Rule]:
    return [
        (kind, a, b, _side_tensors(op, kind, (a, b), side, q, full)) for kind, a, b, side in rules
    ]


def _check_parts(
    op: str,
    mask: Mask,
    sizes: Sizes,
    q: Tensor,
    full: tuple[int, ...],
    computed: bool = False,
) -> None:
    """Checks the operands of a combined mask as if each were passed alone."""
    computed = computed or isinstance(mask, Computed)
    for part in mask.parts():
        _check_parts(op, part, sizes, q, full, computed)
    if computed and not isinstance(mask, Computed | All):
        _checked(op, mask.rules_of_call(sizes), q, full)


def _hint(mask: object) -> str:
    """How to make a mask from a predicate, or from flex_attention's BlockMask."""
    if callable(mask):
        return " (masks.from_predicate(mask, Tq, Tk) makes one from a function)"
    if hasattr(mask, "mask_mod"):
        return " (masks.from_block_mask(mask) makes one from a BlockMask)"
    return ""


def causal_mask(op: str, name: str, bias: CausalBias, full: tuple[int, ...]) -> Mask:
    """The rule for a CausalBias, torch's mask tensor without values."""
    from torch.nn.attention.bias import CausalVariant

    size = (bias.seq_len_q, bias.seq_len_kv)
    if size != full[-2:]:
        raise ValueError(
            f"{op}: {name} must be made for (Tq, Tk)={full[-2:]}, got {name}=CausalBias of {size}"
        )
    return SlidingWindow(-1, 0, top_left=bias.variant == CausalVariant.UPPER_LEFT)


def _side_tensors(
    op: str,
    kind: int,
    size: tuple[int, int],
    side: tuple[Tensor, ...],
    q: Tensor,
    full: tuple[int, ...],
) -> tuple[Tensor, ...]:
    batch, heads, tq, tk = full
    for t in side:
        if t.device != q.device:
            raise ValueError(
                f"{op}: the tensors of a mask must be on the device of q, got {t.device}, "
                f"q.device={q.device}"
            )
    if kind == MaskKind.TENSOR:
        require_broadcastable(op, "mask", side[0], q, full)
        return (_four_dims(side[0], full),)
    if kind in (MaskKind.KEY_LENGTHS, MaskKind.PREFIX):
        require_shape(op, "lengths", side[0], (batch,))
    elif kind == MaskKind.DOCUMENTS:
        side = tuple(
            t.expand(batch, *t.shape[-1:]) if t.shape[:-1] in ((), (1,)) else t for t in side
        )
        require_shape(op, "documents of queries", side[0], (batch, tq))
        require_shape(op, "documents of keys", side[1], (batch, tk))
    elif kind == MaskKind.BLOCKS:
        blocks = (batch, heads, -(-tq // BLOCK), -(-tk // BLOCK))
        codes, bits = side
        fits = codes.dim() == 4 and codes.shape[2:] == blocks[2:]
        fits = fits and is_one_of(codes.shape[0], 1, batch) and is_one_of(codes.shape[1], 1, heads)
        if not fits:
            raise ValueError(
                f"{op}: mask codes must be broadcastable to {blocks}, blocks of {BLOCK} queries "
                f"and keys, got codes.shape={tuple(codes.shape)}"
            )
        require_shape(op, "bits", bits, (bits.shape[0], BLOCK))
        if not is_one_of(size, (0, 0), (tq, tk)):
            raise ValueError(f"{op}: mask must be made for (Tq, Tk)={(tq, tk)}, got size={size}")
    return side


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
            f"{_mask_of_keys(t, full)}, got {name}.shape={tuple(t.shape)}"
        )


def _mask_of_keys(t: Tensor, full: tuple[int, ...]) -> str:
    """Advice for an error: how to pass a mask or bias of the keys, or one per sequence."""
    batch, _, tq, tk = full[-4:] if len(full) >= 4 else (0, 0, 0, 0)
    shape = tuple(t.shape)
    if shape in ((batch, tk), (batch, 1, tk)):
        if t.dtype == torch.bool:
            return "; a mask of the keys that are no padding, (B, Tk), is masks.KeyPadding(mask)"
        return "; a bias of keys (B, Tk) is bias[:, None, None]"
    if shape == (batch, tq, tk):
        return "; one without heads, (B, Tq, Tk), needs a dimension for them, as by [:, None]"
    return ""


def _four_dims(t: Tensor, full: tuple[int, ...]) -> Tensor:
    """View of t with four dimensions; all except the last may still broadcast."""
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


def _scores(op: str, options: Options, q: Tensor, full: tuple[int, ...]) -> list[ScoreRule]:
    """All score rules of a call, checked."""
    batch, heads, tq, tk = full
    alibi_slopes, relative = options.alibi_slopes, options.relative
    sinks, normalizer = options.sinks, options.normalizer
    rules: list[ScoreRule] = []
    transform = transform_of(options)
    if transform is not None:
        name, c = transform
        rules.append((ScoreKind[name.upper()], None, (c,)))
    if options.bias is not None:
        require_bias(op, "bias", options.bias, q)
        require_broadcastable(op, "bias", options.bias, q, full)
        rules.append((ScoreKind.BIAS, _four_dims(options.bias, full), ()))
    for kind, name, t in (
        (ScoreKind.SINKS, "sinks", sinks),
        (ScoreKind.HEAD_SCALE, "head_scale", options.head_scale),
    ):
        if t is not None:
            require_parameter(op, name, t, q, [(heads,)])
            rules.append((kind, t, ()))
    if alibi_slopes is not None:
        if relative is not None:
            raise ValueError(f"{op}: alibi_slopes must be None with relative={shown(relative)}")
        require_parameter(op, "alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)])
        rules.append((ScoreKind.ALIBI, torch.atleast_2d(alibi_slopes)[:, None], (0.0, 0.0)))
    if relative is not None:
        if not isinstance(relative, RelativeBias):
            raise TypeError(
                f"{op}: relative must be a RelativeBias (DistanceRows are for relative_keys and "
                f"relative_queries), got relative={shown(relative)}"
            )
        rule = relative.rule()
        code, table, parameters = rule
        assert table is not None
        require_parameter(op, "the table of relative", table, q, [(1, table.shape[1], heads)])
        if code == ScoreKind.WINDOW and not tq == tk == math.prod(parameters):
            raise ValueError(
                f"{op}: Tq and Tk must be the tokens of a window, got Tq={tq}, Tk={tk}, "
                f"window={parameters}"
            )
        rules.append(rule)
    rules += _distance_rows(op, options, q)
    require_choice(op, "normalizer", normalizer, ("softmax", *NORMALIZERS))
    if normalizer != "softmax":
        if sinks is not None:
            raise ValueError(f"{op}: sinks need softmax, got normalizer={shown(normalizer)}")
        rules.append((ScoreKind[normalizer.upper()], None, ()))
    return rules


def _distance_rows(op: str, options: Options, q: Tensor) -> list[ScoreRule]:
    """The rules of rows of distances."""
    rules: list[ScoreRule] = []
    for kind, name, given in (
        (ScoreKind.RELATIVE_KEYS, "relative_keys", options.relative_keys),
        (ScoreKind.RELATIVE_QUERIES, "relative_queries", options.relative_queries),
    ):
        if given is None:
            continue
        if not isinstance(given, DistanceRows):
            raise TypeError(
                f"{op}: {name} must be DistanceRows (a RelativeBias is for relative), "
                f"got {name}={shown(given)}"
            )
        shape = (given.rows.shape[0], *q.shape[-2:])
        require_parameter(op, f"the rows of {name}", given.rows, q, [shape])
        rules.append((kind, given.rows, (float(given.zero),)))
    if options.relative_queries is not None and options.head_scale is not None:
        raise ValueError(f"{op}: head_scale must be None with relative_queries")
    return rules


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
    """`lse` as `attention` of q returns it."""
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
