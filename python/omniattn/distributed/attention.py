"""Attention of sequences that are split over ranks: around a ring, or from all to all by heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from omniattn.checks.arguments import require_seed, shown
from omniattn.distributed.layout import Layout
from omniattn.distributed.messages import Exchange, Ring
from omniattn.encoding.masks import COLUMN_BITS, MaskKind
from omniattn.encoding.options import TABLES, WITH_LSE, Options, ScoreKind, pack
from omniattn.functional import masks
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention._options import checked_codes
from omniattn.functional.scores.score_mod import encode_score_mod
from omniattn.ops import attention as ops
from omniattn.reference.precision import compute_dtype

OP = "attention"


def split_attention(
    layout: Layout,
    method: str,
    documents: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`omniattn.functional.attention` of this rank's queries to the keys of all ranks.

    Masks, biases, slopes and tables refer to the whole sequence. `documents` (T,) has the numbers
    of the documents of packed tokens.
    """
    options = pack(OP, given)
    q, k, v = autocast(OP, q, k, v)
    batch, heads, tq, tk = check_shapes(OP, q, k, v)
    if tq != tk:
        raise NotImplementedError(
            "attention: in context_parallel queries and keys must be of the same tokens, without "
            f"caches and sources, got Tq={tq}, Tk={tk}"
        )
    if backend == "reference":
        raise NotImplementedError(
            "attention: in context_parallel backend must not be 'reference', whose definition has "
            "no parts"
        )
    total = tq * layout.ranks
    full = (batch, heads, total, total)
    if documents is not None:
        options = _within(documents, options, full)
    _require_seed_on_cpu(options)
    run = _around_ring if method == "ring" else _by_heads
    out, lse = run(layout, q, k, v, full, options)
    return (out, lse) if return_lse else out


def _require_seed_on_cpu(options: Options) -> None:
    if options.dropout_p > 0 and options.seed is not None and not options.seed.is_cpu:
        raise NotImplementedError("attention: in context_parallel seed must be on the CPU")


def _within(documents: Tensor, options: Options, full: tuple[int, ...]) -> Options:
    """Adds the boundaries of documents to the mask."""
    by_position = {
        "mask": options.mask is not None,
        "bias": options.bias is not None,
        "score_mod": options.score_mod is not None,
        "dropout_p": options.dropout_p > 0,
    }
    for name, is_given in by_position.items():
        if is_given:
            raise NotImplementedError(
                f"attention: {name} counts positions of a sequence, which context_parallel with "
                f"cu_seqlens does not, got {name}={shown(getattr(options, name))}"
            )
    if full[0] != 1 or documents.shape[0] != full[2]:
        raise ValueError(
            "context_parallel: with cu_seqlens the batch must be one row of cu_seqlens[-1] tokens, "
            f"got B={full[0]}, T={full[2]}, cu_seqlens[-1]={documents.shape[0]}"
        )
    return options._replace(mask=masks.Documents(documents[None]))


class _Call(NamedTuple):
    """Tensors and options of a call. Its codes have positions in the whole sequence."""

    layout: Layout
    total: int
    reach: tuple[int, int]
    normalizer: str
    mask: Sequence[int]
    score: Sequence[int]
    params: Sequence[float]

    def part(self, first_q: int, first_k: int) -> list[int]:
        """Returns the mask of the part that starts with this query and this key."""
        queries = (MaskKind.QUERIES, first_q, self.total, -1)
        return [*queries, MaskKind.KEYS, first_k, self.total, -1, *self.mask]

    def pairs(self, rank: int, length: int) -> Iterator[tuple[slice, slice, list[int]]]:
        """Yields the rows of queries of this rank and of keys of another whose parts are not
        hidden by the window, and their masks."""
        left, right = self.reach
        for i, own in enumerate(self.layout.own):
            for j, other in enumerate(self.layout.of(rank)):
                ahead = (other - own - 1) * length + 1  # least k - i, at the nearest corner
                behind = (own - other - 1) * length + 1
                if (right >= 0 and ahead > right) or (left >= 0 and behind > left):
                    continue
                rows = slice(i * length, (i + 1) * length)
                keys = slice(j * length, (j + 1) * length)
                yield rows, keys, self.part(own * length, other * length)


def _around_ring(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, full: tuple[int, ...], options: Options
) -> tuple[Tensor, Tensor]:
    """Keys and values go around the ring; each rank attends to what it has meanwhile."""
    if options.normalizer == "stick_breaking":
        raise NotImplementedError(
            'context_parallel: normalizer="stick_breaking" needs method="all_to_all", since the '
            "parts of a ring are not in the order of the keys"
        )
    layout.length(q)
    seed = None
    if options.dropout_p > 0:
        seed = _seed_of_all(layout, options, q)
    checked_codes(OP, q, full, options)  # with the sinks, which are added once, below
    aux, mask, score, params = checked_codes(OP, q, full, options._replace(sinks=None))
    left, right = options.window_size
    reach = (left, 0 if options.causal else right)
    call = _Call(layout, full[2], reach, options.normalizer, mask, score, params)
    out, lse = _RingAttention.apply(call, seed, q, k, v, options.sinks, *aux)
    return out, lse


def _seed_of_all(layout: Layout, options: Options, q: Tensor) -> Tensor:
    """Returns the first rank's seed, so that all ranks drop the weights of one call."""
    seed = require_seed(OP, options.seed, q)
    assert seed is not None
    shared = seed.to(q.device, copy=True)
    dist.broadcast(shared, layout.global_rank(0), group=layout.group)
    return shared.to(seed.device)


class _RingAttention(torch.autograd.Function):
    """Attention in parts; the backward recomputes each part's weights from the lse of the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        seed: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *aux: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layout, length = call.layout, call.layout.length(q)
        wide = compute_dtype(q)
        batch, _, heads, _ = q.shape
        sums = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        # In fp64, as its rounding error would be one of all weights.
        lse = q.new_full((batch, heads, q.shape[1]), -math.inf, dtype=torch.float64)
        if sinks is not None:
            lse[:] = sinks.double()[:, None]
        ring, now = Ring(layout), [k.contiguous(), v.contiguous()]
        for step in range(layout.ranks):
            last = step == layout.ranks - 1
            if not last:
                ring.start(*now)
            rank = (layout.rank - step) % layout.ranks
            for rows, keys, mask in call.pairs(rank, length):
                parts = q[:, rows], now[0][:, keys], now[1][:, keys]
                out_n, lse_n, tail = ops.attention.raw(
                    *parts, list(aux), seed, mask, call.score, call.params
                )
                if call.normalizer not in WITH_LSE:
                    sums[:, rows] += out_n
                    continue
                exact = lse_n.double() + tail.double()
                merged = torch.logaddexp(lse[..., rows], exact)
                sums[:, rows] *= _share(lse[..., rows], merged, wide)
                sums[:, rows] += _share(exact, merged, wide) * out_n
                lse[..., rows] = merged
            if not last:
                now = ring.wait()
        out = sums.to(q.dtype)
        rounded = lse.to(wide)
        tail = torch.where(rounded.isfinite(), lse - rounded.double(), 0).to(wide)
        ctx.save_for_backward(q, k, v, out, rounded, tail, seed, sinks, *aux)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        q, k, v, out, lse, tail, seed, sinks, *aux = ctx.saved_tensors
        layout, length = call.layout, call.layout.length(q)
        wide = compute_dtype(q)
        grad_out, grad_lse = grads
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        needs = ctx.needs_input_grad[6:]
        wanted = [n for n, need in enumerate(needs) if need]
        dq = torch.zeros_like(q, dtype=wide)
        daux = [torch.zeros_like(aux[n], dtype=wide) for n in wanted]
        own = [
            torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (k, v)
        ]
        ring, now = Ring(layout), [k.contiguous(), v.contiguous()]
        sums_ring = Ring(layout)
        for step in range(layout.ranks):
            last = step == layout.ranks - 1
            if not last:
                ring.start(*now)
            rank = (layout.rank - step) % layout.ranks
            found = own if step == 0 else [torch.zeros_like(t) for t in own]
            for rows, keys, mask in call.pairs(rank, length):
                g = None if grad_lse is None else grad_lse[..., rows].contiguous()
                dq_n, dk_n, dv_n, daux_n = ops.attention_backward(
                    *(grad_out[:, rows], g, q[:, rows], now[0][:, keys], now[1][:, keys]),
                    *(list(aux), seed, out[:, rows], lse[..., rows].contiguous()),
                    *(tail[..., rows].contiguous(), mask, call.score, call.params, wanted),
                )
                dq[:, rows] += dq_n
                found[0][:, keys] += dk_n
                found[1][:, keys] += dv_n
                for total, more in zip(daux, daux_n, strict=True):
                    total += more
            # The sums for a rank's keys follow them around the ring, and end at that rank.
            if step > 1:
                found = [a + b for a, b in zip(found, sums_ring.wait(), strict=True)]
            if step > 0:
                sums_ring.start(*found)
            if not last:
                now = ring.wait()
        if layout.ranks > 1:
            own = [a + b for a, b in zip(own, sums_ring.wait(), strict=True)]
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            weight = (sinks.to(wide)[:, None] - lse).exp()
            pull = -(grad_out.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
            pull = pull if grad_lse is None else pull + grad_lse
            dsinks = (weight * pull).sum((0, 2)).to(sinks.dtype)
        spread = iter(daux)
        rest = [
            next(spread).to(t.dtype) if need else None for t, need in zip(aux, needs, strict=True)
        ]
        dk, dv = own
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, *rest


def _share(lse: Tensor, merged: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns exp(lse - merged) (B, T, H, 1), 0 where no key has been seen."""
    share = torch.where(merged == -math.inf, 0, (lse - merged).exp())
    return share.to(dtype).transpose(1, 2)[..., None]


def _by_heads(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, full: tuple[int, ...], options: Options
) -> tuple[Tensor, Tensor]:
    """Each rank gets all tokens of some heads, attends, and returns the results to their ranks."""
    ranks, heads, kv_heads = layout.ranks, q.shape[2], k.shape[2]
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            'context_parallel: with method="all_to_all" the ranks must divide Hq, and divide Hkv '
            f"or be a multiple of it, got Hq={heads}, Hkv={kv_heads}, ranks={ranks}"
        )
    if options.dropout_p > 0:
        raise NotImplementedError(
            'context_parallel: dropout_p > 0 needs method="ring", since the dropped weights depend '
            f"on the number of the head, got dropout_p={options.dropout_p}"
        )
    if kv_heads < ranks:  # each kv head on several ranks
        k, v = (t.repeat_interleave(ranks // kv_heads, 2) for t in (k, v))
    count = heads // ranks
    first = layout.rank * count
    codes = _codes_of_heads(q, full, options, first, count)
    rows = [_to_heads(layout, t) for t in (q, k, v)]
    aux, mask, score, params = codes
    out, lse = ops.attention.alone(*rows, aux, None, mask, score, params)
    out = _to_tokens(layout, out)
    return out, _to_tokens(layout, lse.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


def _to_heads(layout: Layout, t: Tensor) -> Tensor:
    """Maps t (B, T / N, H, D) to (B, T, H / N, D)."""
    parts = t.unflatten(2, (layout.ranks, -1)).movedim(2, 0)
    return layout.natural(Exchange.apply(parts, layout).movedim(0, 1).flatten(1, 2), 1)


def _to_tokens(layout: Layout, t: Tensor) -> Tensor:
    """Inverts `_to_heads`."""
    parts = layout.by_rank(t, 1).unflatten(1, (layout.ranks, -1)).movedim(1, 0)
    return Exchange.apply(parts, layout).movedim(0, 2).flatten(2, 3)


def _codes_of_heads(
    q: Tensor, full: tuple[int, ...], options: Options, first: int, count: int
) -> tuple[list[Tensor], Sequence[int], Sequence[int], Sequence[float]]:
    """Encodes the options for `count` heads from `first` on."""
    batch, heads, total, _ = full
    like = q.new_empty(()).expand(batch, total, heads, q.shape[3])
    mod, own = options.score_mod, slice(first, first + count)
    codes = checked_codes(OP, like, full, options._replace(score_mod=None))
    aux, mask, score, params = codes[0], list(codes[1]), list(codes[2]), list(codes[3])
    for n in range(0, len(mask), 4):
        kind, _, b, at = mask[n : n + 4]
        period = 1
        if kind == MaskKind.STRIDED_HEADS:
            period = 2
        elif kind == MaskKind.FIXED:
            period = max(1, b >> COLUMN_BITS)
        if count % period:
            raise NotImplementedError(
                'context_parallel: with method="all_to_all" a rank must have a multiple of the '
                f"{period} heads after which mask repeats, got {count} heads on a rank"
            )
        if kind in (MaskKind.TENSOR, MaskKind.BLOCKS) and aux[at].shape[1] == heads > 1:
            aux[at] = aux[at][:, own]
    for n in range(0, len(score), 3):
        kind, at = score[n : n + 2]
        if at < 0:
            continue
        if kind == ScoreKind.BIAS:
            aux[at] = aux[at][:, own] if aux[at].shape[1] == heads else aux[at]
        elif kind in (ScoreKind.SINKS, ScoreKind.HEAD_SCALE):
            aux[at] = aux[at][own]
        elif kind in TABLES:
            aux[at] = aux[at][..., own]
        else:  # rows of distances (rows, H, D)
            aux[at] = aux[at][:, own]
    if mod is not None:
        shifted = _from_head(mod, first)
        program = encode_score_mod(OP, shifted, q, (batch, count, total, total), None)
        score += [ScoreKind.PROGRAM, len(aux), len(params), *program.code]
        aux += program.tables
        params += program.constants
    return aux, mask, score, params


def _from_head(mod: Any, first: int) -> Callable[..., Tensor]:
    def shifted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found: Tensor = mod(score, b, h + first, q, k)
        return found

    return shifted
