"""score_mod against torch's flex_attention and its own definition: values, gradients, masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from score_mods import (
    HKV,
    HQ,
    MODS,
    TK,
    TQ,
    B,
    D,
    assert_same,
    gradients_of,
    make_qkv,
    make_tensors,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import omniattn.functional as F
from omniattn import reference
from omniattn.functional import masks


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_the_definition(name: str, causal: bool) -> None:
    tensors = make_tensors()
    q, k, v = make_qkv()
    leaves = [q, k, v, *(t for t in tensors.values() if t.requires_grad)]
    mod = MODS[name](tensors)
    found, wanted = (
        function(q, k, v, score_mod=mod, causal=causal)
        for function in (F.attention, reference.attention)
    )
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    assert_same([found, *gradients_of(found, leaves)], [wanted, *gradients_of(wanted, leaves)])


@pytest.mark.parametrize("name", [n for n in MODS if n != "constant"])
def test_values_are_those_of_flex_attention(name: str) -> None:
    tensors = {n: t.detach() for n, t in make_tensors().items()}
    q, k, v = (t.detach() for t in make_qkv())
    mod = MODS[name](tensors)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    wanted = flex_attention(*heads_first, score_mod=mod, enable_gqa=True).transpose(1, 2)
    assert_same([F.attention(q, k, v, score_mod=mod)], [wanted])


@pytest.mark.parametrize("name", ["alibi", "edges", "gate", "windows", "documents"])
def test_gradcheck(name: str) -> None:
    tensors = make_tensors()
    torch.manual_seed(3)
    q, k, v = (torch.randn(B, t, HQ, 2, dtype=torch.float64) for t in (3, 4, 4))
    floats = [n for n, t in tensors.items() if t.requires_grad and n in ("slopes", "emb", "table")]

    def call(q: Tensor, k: Tensor, v: Tensor, *found: Tensor) -> Any:
        mod = MODS[name](tensors | dict(zip(floats, found, strict=True)))
        return F.attention(q, k, v, score_mod=mod)

    leaves = [t.requires_grad_() for t in (q, k, v)] + [tensors[n] for n in floats]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_options_come_first() -> None:
    q, k, v = make_qkv()
    tensors = make_tensors()
    options: dict[str, Any] = {
        "bias": tensors["bias"],
        "softcap": 2.0,
        "sinks": tensors["slopes"],
        "head_scale": tensors["slopes"] + 0.5,
        "mask": torch.rand(B, 1, TQ, TK) < 0.7,
        "window_size": (100, 20),
        "score_mod": MODS["gate"](tensors),
    }
    leaves = [q, k, v, tensors["bias"], tensors["slopes"], tensors["gate"]]
    both = [f(q, k, v, **options) for f in (F.attention, reference.attention)]
    found, wanted = ([o, *gradients_of(o, leaves)] for o in both)
    assert_same(found, wanted)


def _positions(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    wave = torch.sin(0.3 * q.to(s.dtype) + 0.7 * h.to(s.dtype)) * torch.cos(0.2 * k.to(s.dtype))
    return s + wave + (q - k).to(s.dtype) / 50 + (q * k) % 3 + b


def test_sequences_of_a_packed_batch_have_their_own_positions() -> None:
    torch.manual_seed(4)
    lengths = [5, 0, 40, 101]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(sum(lengths), h, D, dtype=torch.float64) for h in (HQ, HKV, HKV))
    table = torch.randn(16, HQ, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, table)]

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _positions(s, b, h, q, k) + table[(q - k).abs() % 16, h]

    both = [
        f(q, k, v, cu, cu, score_mod=mod) for f in (F.attention_varlen, reference.attention_varlen)
    ]
    assert_same(*([o, *gradients_of(o, leaves)] for o in both))
    for n, (first, last) in enumerate(itertools.pairwise(cu)):
        alone = F.attention(
            *(t[None, first:last] for t in (q, k, v)),
            score_mod=lambda s, b, h, q, k, n=n: mod(s, b + n, h, q, k),
        )
        assert_same([both[0][first:last]], [alone[0]])


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("paged", [False, True])
def test_queries_of_a_cache_stand_after_what_it_holds(queries: int, paged: bool) -> None:
    torch.manual_seed(5)
    lengths = torch.tensor([200, 41, 1])
    q = torch.randn(3, queries, HQ, D, dtype=torch.float64)
    k, v = (torch.randn(3, 256, HKV, D, dtype=torch.float64) for _ in range(2))
    of_key = torch.randn(256, dtype=torch.float64)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _positions(s, b, h, q, k) * of_key[k]

    options: dict[str, Any] = {"score_mod": mod, "causal": True}
    whole = k, v
    if paged:
        options["block_table"] = torch.arange(3 * 8).view(3, 8)
        k, v = (t.reshape(3 * 8, 32, HKV, D) for t in (k, v))
    both = [
        f(q, k, v, lengths, **options) for f in (F.attention_cached, reference.attention_cached)
    ]
    assert_same([both[0]], [both[1]])
    alone = F.attention(
        q[:1],
        *(t[:1, :200] for t in whole),
        score_mod=lambda s, b, h, i, k: mod(s, b, h, i + 200 - queries, k),
        causal=True,
    )
    assert_same([both[0][:1]], [alone])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["bias", "gate", "relative", "edges"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    tensors = {n: t.detach() for n, t in make_tensors(dtype).items()}
    q, k, v = (t.detach().to(dtype) for t in make_qkv())
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    wanted = F.attention(q.double(), k.double(), v.double(), score_mod=MODS[name](wide))
    found = F.attention(q, k, v, score_mod=MODS[name](tensors))
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("floats", [torch.float32, torch.float64])
def test_captured_integers(dtype: torch.dtype, floats: torch.dtype) -> None:
    q, k, v = (t.detach().to(floats) for t in make_qkv())
    of_k, pairs = (torch.randint(0, 2, shape).to(dtype) for shape in ((TK,), (TQ, TK)))

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(of_k[k] == pairs[q, k], s, s * 0.5 - 1)

    both = [f(q, k, v, score_mod=mod) for f in (F.attention, reference.attention)]
    assert_same(both[:1], both[1:], 1e-5 if floats == torch.float32 else 1e-12)


def test_second_derivatives_and_weights() -> None:
    tensors = make_tensors()
    q, k, v = make_qkv(tq=3, tk=5)
    mod = MODS["gate"](tensors)
    out, lse = F.attention(q, k, v, score_mod=mod, return_lse=True)
    weights = F.attention_weights(q, k, lse, score_mod=mod)
    values = v.repeat_interleave(HQ // HKV, 2)
    assert_same([torch.einsum("bhqk,bkhd->bqhd", weights, values)], [out])


def test_compiles_without_breaks() -> None:
    tensors = make_tensors(torch.float32)
    q, k, v = (t.detach().float().requires_grad_() for t in make_qkv())
    leaves = [q, k, v, tensors["slopes"], tensors["emb"]]

    def call(q: Tensor, k: Tensor, v: Tensor, edge: Tensor) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s - tensors["slopes"][h] * (q - k).abs()
            return s + tensors["emb"][edge[b, q, k], h]

        return F.attention(q, k, v, score_mod=mod)

    wanted = call(q, k, v, tensors["edge"])
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, tensors["edge"])
    assert_same(
        [found, *gradients_of(found, leaves)], [wanted, *gradients_of(wanted, leaves)], 1e-6
    )


def test_exports() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.rand(HQ))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return F.attention(
                q, k, v, score_mod=lambda s, b, h, q, k: s - self.slopes[h] * (q - k).abs()
            )

    q, k, v = (t.detach().float() for t in make_qkv())
    layer = Layer()
    for strict in (False, True):
        exported = torch.export.export(layer, (q, k, v), strict=strict).module()
        assert_same([exported(q, k, v)], [layer(q, k, v)])


@pytest.mark.parametrize("with_mod", [False, True])
def test_a_function_is_a_mask(with_mod: bool) -> None:
    tensors = make_tensors()
    q, k, v = make_qkv()
    seg = tensors["seg"]
    mod = MODS["gate"](tensors) if with_mod else None

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (seg[b, q] == seg[b, k]) | (k < h) & (q >= 3)

    dense = masks.from_predicate(mask, TQ, TK, batch=B, heads=HQ)
    found, wanted = (
        [o, *gradients_of(o, [q, k, v])]
        for o in (F.attention(q, k, v, mask=m, score_mod=mod) for m in (mask, dense))
    )
    assert_same(found, wanted)
    assert_same([reference.attention(q, k, v, mask=mask, score_mod=mod)], wanted[:1])


def _windows() -> tuple[masks.Mask, masks.Mask, masks.Mask]:
    ids = torch.randint(0, 3, (B, TK))
    return masks.SlidingWindow(9, 4), masks.Documents(ids[:, :TQ], ids), masks.EveryKth(7, False)


def test_masks_have_or_and_not() -> None:
    q, k, v = make_qkv()
    a, b, c = _windows()
    mask = (a | ~b) & ~(c & b)
    x, y, z = (m.dense(TQ, TK) for m in (a, b, c))
    dense = (x | ~y) & ~(z & y)
    assert torch.equal(mask.dense(TQ, TK).expand(B, 1, TQ, TK), dense)
    assert mask.count(TQ, TK, batch=B) == int(dense.sum())
    for room in (F, reference):
        assert_same([room.attention(q, k, v, mask=mask)], [F.attention(q, k, v, mask=dense)])
    compiled = torch.compile(lambda *x: F.attention(*x, mask=mask), fullgraph=True, backend="eager")
    assert_same([compiled(q, k, v)], [F.attention(q, k, v, mask=dense)])
    cached = F.attention_cached(q, k, v, torch.full((B,), TK), mask=mask)
    assert_same([cached], [F.attention(q, k, v, mask=dense)])
    with pytest.raises(TypeError, match="AnyOf"):
        a | dense  # type: ignore[operator]


def test_a_block_mask_is_a_mask() -> None:
    q, k, v = (t.detach() for t in make_qkv(tq=TK))
    seg = torch.randint(0, 3, (B, TK))

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (seg[b, q] == seg[b, k]) & (q >= k) | (k < 20)

    for size in (128, 16, 48):
        block_mask = create_block_mask(mod, B, None, TK, TK, device="cpu", BLOCK_SIZE=size)
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        wanted = flex_attention(*heads_first, block_mask=block_mask, enable_gqa=True)
        mask = masks.from_block_mask(block_mask)
        assert_same([F.attention(q, k, v, mask=mask)], [wanted.transpose(1, 2)])
    with pytest.raises(TypeError, match="BlockMask"):
        masks.from_block_mask(seg)  # type: ignore[arg-type]


def test_not_a_function() -> None:
    q, k, v = make_qkv()
    with pytest.raises(TypeError, match="score_mod must be a function"):
        F.attention(q, k, v, score_mod=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda b, h, q, k: q - k, "mask must be a function that gives bool tensors"),
        (lambda b, h, q, k: True, "mask must be .* bool tensors, got True"),
        (lambda q, k: q >= k, r"mask must be a function of \(b, h, q, k\): too many"),
    ],
)
def test_mask_functions_that_are_none(mask, message):
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(TypeError, match=message):
        F.attention(q, q, q, mask=mask)
