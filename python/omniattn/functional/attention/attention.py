"""Attention with masks, biases, softcap and dropout."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.jagged import (
    is_jagged,
    length_bound,
    require_ragged,
    same_boundaries,
    with_boundaries,
)
from omniattn.encoding.options import AttentionOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention._options import attempt, run
from omniattn.functional.attention.varlen import attention_varlen as attention_varlen
from omniattn.ops.dispatch.plain import is_plain
from omniattn.ops.dispatch.ranks import ACTIVE

__all__ = ["attention"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(AttentionOptions)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Tiled attention: memory grows with T, not with T^2; masked tiles are skipped.

    ``O = softmax(f(head_scale * scale * q k^T) + bias - slope |k - i| + relative) v`` over the
    allowed keys, ``f`` the identity or ``softcap * tanh(. / softcap)``, i = q + Tk - Tq the
    position of query q among the keys. Query head h reads kv head ``h // (Hq / Hkv)``.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16; any strides, copied only where the
            last one is not 1. Under autocast q, k and v are cast to its dtype.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype; Dv may differ from D. All three may be jagged nested
            tensors (B, j, H, D), sequences of any lengths; the call is then equivalent to
            :func:`attention_varlen`, with results of q's boundaries.
        causal: query i sees keys up to i + Tk - Tq (bottom-right aligned). Off unless asked for;
            the module :class:`omniattn.modules.Attention` is causal unless told otherwise.
        window_size: (left, right): keys from left before to right after that position, inclusive;
            -1 is unbounded.
        mask: bool, True = attend, broadcastable to (B, Hq, Tq, Tk), or a value of
            `functional.masks`, or f(b, h, q, k) of 0-d tensors, which becomes part of score_mod: no
            (Tq, Tk) tensor is made, no tile is skipped (`masks.from_predicate` makes a mask whose
            hidden tiles cost nothing). k and v of hidden keys must be finite, since 0 * NaN is NaN:
            only keys beyond lengths (`masks.KeyLengths`, caches, packed batches) are not read. All
            masks are ANDed.
        bias: added to the logits after scale and softcap, broadcastable to (B, Hq, Tq, Tk), of a
            floating dtype not wider than q's accumulator, float32 or float64 for float64. Its
            gradient has its own shape and dtype. -inf hides a key, whose k and v must be finite; a
            finite value does not: if all keys of a row have finfo.min, the result is the mean of
            their values, as in torch. A sum of terms beyond the accumulator's range is infinite.
        scale: factor of q k^T; None is 1 / sqrt(D).
        softcap: 0 is off.
        alibi_slopes: (Hq,) or (B, Hq), see :func:`alibi_slopes`; no (Tq, Tk) tensor is made.
        relative: a value of `functional.scores` that reads a table (T5, Swin, any function of the
            distance) without making a (Tq, Tk) tensor; not together with alibi_slopes.
        relative_keys, relative_queries: `functional.scores.DistanceRows`, vectors r and w of D
            numbers for each distance k - i and query head: q . k becomes q . k + q . r + k . w
            without a (Tq, Tk) tensor. relative_queries excludes head_scale.
        sinks: (Hq,), a logit per head that takes part in the softmax with a value of 0: it is not
            scaled, capped, masked or dropped. (B, Hq, Tq), a logit per query, joins the result of
            the kernel by its lse, so that O is rounded twice.
        head_scale: (Hq,), a factor of scale per head.
        normalizer: how logits become weights: "softmax", or each logit by itself with "sigmoid"
            (pass its bias -ln Tk as `bias`) or "relu2", relu(logit)^2 (with scale = 1 / Tk), or
            "stick_breaking", see :func:`stick_breaking_attention`, or "softpick", see
            :func:`softpick_attention`.
        score_mod: f(score, b, h, q, k) of 0-d tensors as torch's flex_attention takes it: the new
            score. It gets the score after all options above, and masks apply after it. Each call
            runs it once, with values that record its operations, and the kernels run these over the
            rows of a tile: no (Tq, Tk) tensor is made. It may use arithmetic, comparisons, & | ^ ~,
            where, most pointwise functions, and captured tensors indexed by integers made of b, h,
            q and k, which get gradients. For floats a // b is floor(a / b) and a % b is a - floor(a
            / b) b: where a / b rounds to an integer, torch, which computes both exactly, may give
            the one below. q and k are row indices, in packed batches within the sequence; in
            caches q is the position among the keys. Floats are of the compute type, integers have
            32 bits (64 for float64), in which captured ones must fit and beyond which arithmetic
            wraps around; reads outside a tensor give NaN, or 0 for integers. Hidden pairs add
            nothing to any gradient, whatever tensors hold there. But torch computes and
            differentiates values that depend on only one of q, k and k - q beforehand: if only
            hidden pairs read t[k] = 0, the gradient of log(t[k]) there is 0 / 0, NaN, as in torch.
        dropout_p: probability of dropping an attention weight; kept ones are multiplied by
            1 / (1 - dropout_p).
        seed: int64 (2,), [seed, offset] of the dropout mask, which is a function of
            (seed, offset, b, h, i, j) alone. None draws one from torch's generator. It is on the
            CPU, or on q's device, where a captured CUDA graph reads it again at every replay.
        return_lse: also return the log-sum-exp of the masked logits; with "stick_breaking" the
            logarithm of the remainder instead, with "softpick" ``ln sum |exp(logit) - 1|``.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_lse lse (B, Hq, Tq) in float32 (float64 for
        float64), the sink included. A query that sees no key gives O = 0, lse = -inf (the sink, if
        there is one) and zero gradients. A logit of NaN or +inf makes O and lse of its row NaN.

    Raises:
        TypeError: a dtype is unsupported or differs from the others.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device, or score_mod contains an operation
            that cannot be traced; the message names it.

    Note:
        Logits, softmax and all sums are in fp32 (fp64 for fp64) and rounded once. Forward and
        backward do not depend on the number of threads. The backward takes O as it was rounded:
        where the values of half inputs share a mean many times their spread, gradients of q and k
        have the error of that rounding, as in FlashAttention. Gradients flow to q, k, v, bias,
        alibi_slopes, the table of `relative`, rows of distances, sinks, head_scale and tensors that
        score_mod captures, each of its own shape and dtype, through O and lse; second and
        forward-mode derivatives recompute the eager definition in tiles, in O(T) memory (pages of
        a cache: at once). softmax(s / T) with a temperature T is scale = 1 / T.

    Reference:
        Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762; Dao et al.,
        FlashAttention, 2022, arXiv:2205.14135; Dao, FlashAttention-2, 2023, arXiv:2307.08691;
        ALiBi: Press et al., Train Short, Test Long, 2021, arXiv:2108.12409; relative_keys: Shaw et
        al., Self-Attention with Relative Position Representations, 2018, arXiv:1803.02155; both:
        He et al., DeBERTa, 2020, arXiv:2006.03654; sinks: OpenAI, gpt-oss, 2025, arXiv:2508.10925,
        and of queries Inkling 2 in transformers 5.24; sigmoid: Ramapuram et al., Theory, Analysis,
        and Best Practices for Sigmoid Self-Attention, 2024, arXiv:2409.04431; relu2: Hua et al.,
        Transformer Quality in Linear Time, 2022, arXiv:2202.10447; score_mod: Dong et al., Flex
        Attention, 2024, arXiv:2412.05496.

    Example:
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> attention(q, k, v, causal=True).flatten()
        tensor([1., 2.])
    """
    op = "attention"
    if is_jagged(q):
        return _attention_of_jagged(q, k, v, return_lse, backend, options)
    if backend is None and is_plain(q, k, v):
        found = attempt(op, q, k, v, options, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    if ACTIVE.region is not None:
        given: dict[str, Any] = {"return_lse": return_lse, "backend": backend, **options}
        split: Tensor | tuple[Tensor, Tensor] = ACTIVE.region.attend(q, k, v, **given)
        return split
    packed = pack(op, options)
    q, k, v = autocast(op, q, k, v)
    full = check_shapes(op, q, k, v)
    out, lse = run(op, q, k, v, full, packed, return_lse, backend)
    return (out, lse) if return_lse else out


def _attention_of_jagged(
    q: Any,
    k: Any,
    v: Any,
    return_lse: bool,
    backend: str | None,
    options: AttentionOptions,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns O (B, j, Hq, Dv) and lse (B, Hq, j) of nested q, k and v (B, j, H, D)."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_ragged("attention", name, t)
    if not same_boundaries(k, v):
        raise ValueError(
            "attention: k and v must have the same boundaries, "
            f"got k.shape={k.shape}, v.shape={v.shape}"
        )
    packed = q.values(), k.values(), v.values(), q.offsets(), k.offsets()
    bounds = length_bound(q), length_bound(k)
    if not return_lse:
        return with_boundaries(attention_varlen(*packed, *bounds, backend=backend, **options), q)
    out, lse = attention_varlen(*packed, *bounds, return_lse=True, backend=backend, **options)
    return with_boundaries(out, q), with_boundaries(lse.T, q).transpose(1, 2)
