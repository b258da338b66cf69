"""Checks and encodes the options of attention, and calls the op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    is_causal_bias,
    is_one_of,
    require_bool,
    require_choice,
    require_number,
    require_pair,
    require_seed,
    require_shape,
    shown,
    takes_own_kernels,
)
from omniattn.checks.remembered import VALUES, remembered
from omniattn.checks.tracing import may_train
from omniattn.encoding.attention import Codes, after_layout, encode, with_own_kernels
from omniattn.encoding.masks import BLOCK, MAX_RULES, MaskKind, Rule, Sizes
from omniattn.encoding.options import (
    ALL_NORMALIZERS,
    PLAIN_OPTIONS,
    TRANSFORMS,
    WITH_LSE,
    Options,
    ScoreKind,
    ScoreRule,
    pack,
    transform_of,
)
from omniattn.functional.attention._common import (
    LONGEST,
    causal_mask,
    four_dims,
    mask_of_keys,
    refuse_gradients,
    require_bias,
    require_broadcastable,
    require_parameter,
)
from omniattn.functional.masks import All, BoolMask, Mask, SlidingWindow
from omniattn.functional.masks.computed import Computed
from omniattn.functional.scores import DistanceRows, RelativeBias
from omniattn.functional.scores.score_mod import encode_score_mod
from omniattn.ops import attention as ops
from omniattn.reference.attention.attention import default_scale, merge_attention

_LARGEST_FACTOR = torch.finfo(torch.float32).max / 2  # finite times log2(e)
_NO_TENSORS = (None,) * (len(Options._fields) - PLAIN_OPTIONS)


class Settings(NamedTuple):
    """Options that are plain values, checked and encoded; a layer's calls share them."""

    window: tuple[Rule, ...]
    transform: tuple[ScoreRule, ...]
    normalizer: tuple[ScoreRule, ...]
    scale: float
    dropout_p: float
    #: mask, score and params of a call with no other options.
    codes: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


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
    factors: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Returns O and lse of a call with shape `full` = (B, Hq, Tq, Tk).

    `factors` has the scales of the rows of k and v, if these are int8.
    """
    packed = layout is not None and layout[0] == MaskKind.PACKED
    options, sinks = without_query_sinks(op, q, options, packed=packed)
    aux, mask, score, params = checked_codes(op, q, full, options, layout)
    require_bool(op, "return_lse", return_lse)
    if return_lse and options.normalizer not in WITH_LSE:
        raise ValueError(
            f"{op}: return_lse needs softmax, got normalizer={shown(options.normalizer)}"
        )
    seed = require_seed(op, options.seed, q) if options.dropout_p > 0 else None
    found: tuple[Tensor, Tensor]
    if factors:
        refuse_gradients(op, q, *factors, *aux)
        attend = implementation(op, backend, q, ops.attention_int8)
        found = attend(q, k, v, *factors, aux, mask, score, params)
    else:
        attend = implementation(op, backend, q, ops.attention)
        if takes_own_kernels(backend, q):
            mask = with_own_kernels(mask)
        found = attend(q, k, v, aux, seed, mask, score, params)
    return found if sinks is None else merge_attention(found[:1], found[1:], sinks=sinks)


def without_query_sinks(
    op: str, q: Tensor, options: Options, *, packed: bool = False
) -> tuple[Options, Tensor | None]:
    """Returns the options without sinks of queries, and these sinks (B, Hq, Tq) or None."""
    sinks = options.sinks
    if not isinstance(sinks, Tensor) or sinks.dim() < 2:
        return options, None
    batch, tq, heads, _ = q.shape
    shape = (heads, tq) if packed else (batch, heads, tq)
    require_parameter(op, "sinks", sinks, q, [(heads,), shape])
    _require_softmax(op, options)
    return options._replace(sinks=None), sinks.view(batch, heads, tq)


def attempt(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    return_lse: bool,
    layout: Rule | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns O and lse of a call of plain tensors and plain options, or None if the call has
    others, or something that `run` must name in an error."""
    if q.ndim != 4:
        return None
    of_call: Callable[..., Settings | None] = _settings_of_call
    for value in options.values():
        if type(value) is tuple:  # the window
            of_call = _new_settings_of_call
        elif type(value) not in VALUES:
            return None
    is_double = q.dtype == torch.float64
    settings = of_call(op, q.shape[-1], is_double, *options, *options.values())
    if settings is None or settings.dropout_p > 0:
        return None
    if type(return_lse) is not bool or (return_lse and settings.normalizer):
        return None
    mask: Sequence[int] | None
    score: Sequence[int] | None
    aux: list[Tensor] | None = []
    mask, score, params = settings.codes
    if layout is not None:
        mask, aux = after_layout(layout, mask), [*layout[3]]
    if takes_own_kernels(None, q):
        mask = with_own_kernels(mask)
    if not may_train():  # None takes 0.7 us less than an empty list
        aux, mask, score = aux or None, mask or None, score or None
    found: tuple[Tensor, Tensor] | None
    found = ops.attention.attempt(q, k, v, aux, None, mask, score, params)
    return found


def _new_settings_of_call(op: str, dim: int, is_double: bool, *given: Any) -> Settings | None:
    """Returns the settings of a call whose options are `given`, first all names and then all
    values; None if it has options that are no plain values."""
    count = len(given) // 2
    options = pack(op, dict(zip(given[:count], given[count:], strict=True)))
    if not all(map(is_, options[PLAIN_OPTIONS:], _NO_TENSORS)):
        return None
    return _settings_of(op, dim, is_double, options)


_settings_of_call = remembered(_new_settings_of_call)


def _settings_of(op: str, dim: int, is_double: bool, options: Options) -> Settings:
    window = options.window_size
    if type(window) is not tuple or len(window) != 2:
        require_pair(op, "window_size", window, -1, LONGEST)
    return _settings(op, dim, is_double, *window, *options[1:PLAIN_OPTIONS])


def checked_codes(
    op: str, q: Tensor, full: tuple[int, ...], options: Options, layout: Rule | None = None
) -> Codes:
    """Encodes the options for the op."""
    settings = _settings_of(op, q.shape[-1], q.dtype == torch.float64, options)
    if all(map(is_, options[PLAIN_OPTIONS:-1], _NO_TENSORS)):
        mask, score, params = settings.codes
        if layout is None:
            return [], mask, score, params
        return [*layout[3]], after_layout(layout, mask), score, params
    rules = [*settings.window, *_mask(op, options.mask, q, full, layout)]
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
    terms = (*settings.transform, *_scores(op, options, q, full), *settings.normalizer)
    return encode(rules, terms, settings.scale, settings.dropout_p, program)


@remembered
def _settings(op: str, dim: int, is_double: bool, left: int, right: int, *others: Any) -> Settings:
    """Checks the options that are plain values, `others` in the order of `Options`, for q of last
    size `dim` that is float64 or not."""
    options = Options((left, right), *others)
    if options.scale is not None:
        require_number(op, "scale", options.scale)
    for name in TRANSFORMS:
        require_number(op, name, getattr(options, name), 0)
    require_number(op, "dropout_p", options.dropout_p, 0, 1)
    scale = default_scale(dim) if options.scale is None else options.scale
    transform = transform_of(options)
    name, c = transform or ("softcap", 0.0)
    # Factors in the kernels (semantics/score.h) must be finite: 0 * inf would be NaN.
    factor = abs(scale) / c if c else abs(scale)
    if not is_double and not max(factor, c) < _LARGEST_FACTOR:
        raise ValueError(
            f"{op}: scale, {name} and scale / {name} must be below {_LARGEST_FACTOR:.2g} "
            f"unless q is float64, got scale={scale}, {name}={c}"
        )
    require_bool(op, "causal", options.causal)
    require_pair(op, "window_size", options.window_size, -1, LONGEST)
    window: tuple[Rule, ...] = ()
    if options.causal or left >= 0 or right >= 0:
        window = tuple(SlidingWindow(left, 0 if options.causal else right).rules())
    require_choice(op, "normalizer", options.normalizer, ALL_NORMALIZERS)
    first: tuple[ScoreRule, ...] = ()
    if transform is not None:
        first = ((ScoreKind[name.upper()], None, (c,)),)
    last: tuple[ScoreRule, ...] = ()
    if options.normalizer != "softmax":
        last = ((ScoreKind[options.normalizer.upper()], None, ()),)
    _, mask, score, params = encode(window, first + last, scale, options.dropout_p)
    codes = tuple(map(int, mask)), tuple(map(int, score)), tuple(params)
    return Settings(window, first, last, scale, options.dropout_p, codes)


def _mask(
    op: str, mask: object, q: Tensor, full: tuple[int, ...], layout: Rule | None
) -> list[Rule]:
    """Returns the checked rules of the option `mask`."""
    if mask is None:
        return []
    found: Mask
    if is_causal_bias(mask):
        found = causal_mask(op, "mask", mask, full)
    elif isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{op}: mask must be bool, True = attend (additive masks go to bias"
                f"{mask_of_keys(mask.bool(), full)}), "
                f"got mask.dtype={mask.dtype}, mask.shape={tuple(mask.shape)}"
            )
        found = BoolMask(mask)
    elif isinstance(mask, Mask):
        found = mask
    else:
        raise TypeError(
            f"{op}: mask must be a Tensor or a Mask{_hint(mask)}, got mask={shown(mask)}"
        )
    sizes = Sizes(full[2], full[3], q.device, full[1])
    if layout is None:
        _check_parts(op, found, sizes, q, full)
    rules = found.rules_of_call(sizes, layout)
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
    """Returns an error's advice for a predicate or flex_attention's BlockMask as mask."""
    if callable(mask):
        return " (masks.from_predicate(mask, Tq, Tk) makes one from a function)"
    if hasattr(mask, "mask_mod"):
        return " (masks.from_block_mask(mask) makes one from a BlockMask)"
    return ""


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
        return (four_dims(side[0], full),)
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


def _scores(op: str, options: Options, q: Tensor, full: tuple[int, ...]) -> list[ScoreRule]:
    """Returns the checked score rules of tensors and tables."""
    batch, heads, tq, tk = full
    alibi_slopes, relative, sinks = options.alibi_slopes, options.relative, options.sinks
    rules: list[ScoreRule] = []
    if options.bias is not None:
        require_bias(op, "bias", options.bias, q)
        require_broadcastable(op, "bias", options.bias, q, full)
        rules.append((ScoreKind.BIAS, four_dims(options.bias, full), ()))
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
    if sinks is not None:
        _require_softmax(op, options)
    return rules


def _require_softmax(op: str, options: Options) -> None:
    """Requires the normalizer with which sinks can be used."""
    if options.normalizer != "softmax":
        raise ValueError(f"{op}: sinks need softmax, got normalizer={shown(options.normalizer)}")


def _distance_rows(op: str, options: Options, q: Tensor) -> list[ScoreRule]:
    """Returns the score rules of rows of distances."""
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
