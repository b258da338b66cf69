"""A part of a call, some of its queries and keys, is exactly that part of the whole: masks, terms
and dropout see global positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from omniattn import reference
from omniattn.encoding.masks import MaskKind
from omniattn.encoding.options import ScoreKind, pack
from omniattn.functional import masks, merge_attention, scores
from omniattn.functional.attention._options import checked_codes
from omniattn.ops import attention as ops

F64 = torch.float64
BATCH, HEADS, TQ, TK = 2, 4, 150, 230
FULL = (BATCH, HEADS, TQ, TK)
CUTS_Q, CUTS_K = (0, 53, TQ), (0, 60, 132, TK)
#: (first query, first key) of 2 x 3 parts and where they end.
PARTS = list(itertools.product(itertools.pairwise(CUTS_Q), itertools.pairwise(CUTS_K)))

SEEDED = {"dropout_p": 0.3, "seed": torch.tensor([7, 3])}
OPTIONS = {
    "causal": {"causal": True},
    "window": {"mask": masks.SlidingWindow(40, 9)},
    "topleft": {"mask": masks.SlidingWindow(70, 0, top_left=True)},
    "prefix": {"mask": masks.PrefixLM(torch.tensor([100, 20]))},
    "chunk": {"mask": masks.Chunked(48)},
    "documents": {"mask": masks.Documents(torch.arange(TQ) // 41, torch.arange(TK) // 63)},
    "strided": {"mask": masks.Strided(7, 20)},
    "blocks": {"mask": masks.from_predicate(lambda b, h, q, k: (q * 7 + k * 3) % 11 > 4, TQ, TK)},
    "neighbors": {"mask": masks.Neighborhood(31, dilation=3)},
    "grid": {"mask": masks.GridNeighborhood((10, 23), (3, 5), dilation=(1, 2))},
    "tensor": {"mask": torch.arange(TQ)[:, None] % 5 != torch.arange(TK) % 5},
    "alibi": {"alibi_slopes": torch.rand(HEADS, dtype=F64), "causal": True},
    "distances": {"relative": scores.DistanceBias(torch.randn(101, HEADS, dtype=F64), 60)},
    "rows": {
        "relative_keys": scores.DistanceRows(torch.randn(101, HEADS, 16, dtype=F64), 60),
        "relative_queries": scores.DistanceRows(torch.randn(300, HEADS, 16, dtype=F64), -120),
        "causal": True,
    },
    "buckets": {"relative": scores.T5Bias(torch.randn(16, HEADS, dtype=F64))},
    "bias": {"bias": torch.randn(1, HEADS, TQ, TK, dtype=F64), "softcap": 5.0},
    "biaskeys": {"bias": torch.randn(BATCH, 1, 1, TK, dtype=F64)},
    "dropout": SEEDED,
    "both": SEEDED | {"alibi_slopes": torch.rand(HEADS, dtype=F64), "causal": True},
}


def _qkv(dtype: torch.dtype) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((BATCH, TQ, HEADS, 16), (BATCH, TK, 2, 16), (BATCH, TK, 2, 8))
    return [torch.randn(s, generator=make, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def _call(
    q: Tensor, k: Tensor, v: Tensor, options: dict, first: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """O, lse and the tensors of the options, of the whole or of the part that starts at `first`."""
    record = pack("attention", options)
    aux, mask, score, params = checked_codes("attention", q, FULL, record)
    if first is not None:
        mask = [MaskKind.QUERIES, first[0], TQ, -1, MaskKind.KEYS, first[1], TK, -1, *mask]
    seed = record.seed if record.dropout_p > 0 else None
    return (*ops.attention(q, k, v, aux, seed, mask, score, params), aux)


def _in_parts(q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    rows = []
    for q0, q1 in itertools.pairwise(CUTS_Q):
        each = [
            _call(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], options, (q0, k0))[:2]
            for k0, k1 in itertools.pairwise(CUTS_K)
        ]
        rows.append(merge_attention(*zip(*each, strict=True)))
    outs, lses = zip(*rows, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _trained(options: dict, dtype: torch.dtype) -> tuple[dict, list[Tensor]]:
    """The options with parameters of their own that need a gradient, and these."""
    found: dict = {}
    parameters = []
    for name in ("bias", "alibi_slopes"):
        if name in options:
            found[name] = options[name].to(dtype).requires_grad_()
            parameters.append(found[name])
    for name in ("relative", "relative_keys", "relative_queries"):
        if name in options:
            tensor, *rest = vars(options[name]).values()
            parameters.append(tensor.to(dtype).requires_grad_())
            found[name] = type(options[name])(parameters[-1], *rest)
    return options | found, parameters


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=["f64", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_parts_make_the_whole(name: str, dtype: torch.dtype) -> None:
    q, k, v = _qkv(dtype)
    options, parameters = _trained(OPTIONS[name], dtype)
    want = _call(q, k, v, options)[:2]
    got = _in_parts(q, k, v, options)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == F64 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(got, want, **close)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * torch.arange(8)).sum() + lse[lse.isfinite()].square().sum()

    leaves = [q, k, v, *parameters]
    grads = [torch.autograd.grad(loss(*x), leaves) for x in (got, want)]
    if dtype != F64:
        close["atol"] = 0.02 * max(float(g.abs().max()) for g in grads[1])
    torch.testing.assert_close(*grads, **close)


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=["f64", "bf16"])
def test_bias_of_the_part_alone(dtype: torch.dtype) -> None:
    """A bias may have the part's rows, its columns or both; its gradient equals the whole
    call's."""
    q, k, v = _qkv(dtype)
    bias = torch.randn(BATCH, HEADS, TQ, TK, dtype=F64).to(dtype).requires_grad_()
    rows, keys = slice(53, 120), slice(60, 132)
    options = OPTIONS["causal"]
    mine = q[:, rows], k[:, keys], v[:, keys]
    whole = _call(*mine, options | {"bias": bias}, (53, 60))[:2]
    record = pack("attention", options | {"bias": bias})
    _, mask, score, params = checked_codes("attention", q, FULL, record)
    code = [MaskKind.QUERIES, 53, TQ, -1, MaskKind.KEYS, 60, TK, -1, *mask]
    wanted = torch.autograd.grad(whole[0].sum(), [q, k, v, bias])
    for part in (bias[:, :, rows], bias[..., keys], bias[:, :, rows, keys]):
        got = ops.attention(*mine, [part], None, code, score, params)
        torch.testing.assert_close(got[:2], whole)
        torch.testing.assert_close(torch.autograd.grad(got[0].sum(), [q, k, v, bias]), wanted)


@pytest.mark.parametrize("name", ["causal", "tensor", "alibi", "buckets", "bias", "both"])
def test_second_derivatives_of_parts(name: str) -> None:
    """Second derivatives equal the definition's, in which the whole call has zeros around the
    part."""
    q, k, v = (t.detach() for t in _qkv(F64))
    options, parameters = _trained(OPTIONS[name], F64)
    mine = [q[:, 140:].requires_grad_(), *(t[:, 132:].requires_grad_() for t in (k, v))]

    def second(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        loss = out.square().sum() + lse[lse.isfinite()].square().sum()
        first = torch.autograd.grad(loss, mine, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*mine, *parameters])

    got = second(*_call(*mine, options, (140, 132))[:2])
    others = [t.clone() for t in (q, k, v)]
    want = second(*_rows_of_definition(others, mine, options))
    torch.testing.assert_close(got, want)


def _rows_of_definition(whole: list[Tensor], mine: list[Tensor], options: dict) -> tuple:
    """The last queries of the reference, to the last keys alone."""
    q, k, v = (
        torch.cat((t[:, : t.shape[1] - m.shape[1]], m), 1) for t, m in zip(whole, mine, strict=True)
    )
    seen = options.get("mask", torch.ones(1, dtype=torch.bool)) & (torch.arange(TK) >= 132)
    call = reference.attention(q, k, v, return_lse=True, **(options | {"mask": seen}))
    return call[0][:, 140:], call[1][:, :, 140:]


def test_few_queries() -> None:
    """Few queries take the path of decoding."""
    q, k, v = _qkv(F64)
    options = OPTIONS["both"]
    want = _call(q, k, v, options)[0]
    parts = [
        _call(q[:, 147:], k[:, a:b], v[:, a:b], options, (147, a))[:2]
        for a, b in itertools.pairwise(CUTS_K)
    ]
    torch.testing.assert_close(merge_attention(*zip(*parts, strict=True))[0], want[:, 147:])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([MaskKind.QUERIES, 1, TQ, -1], "150 queries must lie in the whole, got first=1 of 150"),
        ([MaskKind.KEYS, -4, TK, -1], "230 keys must lie in the whole, got first=-4 of 230"),
        ([MaskKind.KEYS, 2, TK + 2, -1], "must start at a multiple of 4 for dropout, got first=2"),
        (
            [MaskKind.CACHED, 0, 0, 0, MaskKind.KEYS, 0, TK, -1],
            "packed and cached batches cannot be part",
        ),
        ([MaskKind.CHUNK, 8, 0, -1, MaskKind.KEYS, 0, TK, -1], "must be a kind of"),
    ],
)
def test_wrong_parts(code: list[int], message: str) -> None:
    q, k, v = (t.detach() for t in _qkv(F64))
    aux = [torch.full((BATCH,), TK)]
    with pytest.raises(RuntimeError, match=message):
        ops.attention(q, k, v, aux, SEEDED["seed"], code, [], [1.0, 0.3])


def test_parts_of_windows_are_refused() -> None:
    q, k, v = (t.detach()[:, :36] for t in _qkv(F64))
    table = torch.zeros(1, 121, HEADS, dtype=F64)
    code = [MaskKind.KEYS, 0, 36, -1]
    window = ([ScoreKind.WINDOW, 0, 2], [1.0, 0.0, 6.0, 6.0])
    with pytest.raises(RuntimeError, match="a call with windows cannot be part"):
        ops.attention(q, k[:, :20], v[:, :20], [table], None, code, *window)
