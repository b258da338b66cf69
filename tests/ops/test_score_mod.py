"""score_mod against torch's flex_attention and its own definition: values, gradients, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import omniattn.functional as F
from omniattn import reference
from omniattn.functional import masks

B, HQ, HKV, TQ, TK, D = 2, 4, 2, 37, 150, 8
Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    floats = {
        "slopes": torch.rand(HQ),
        "table": torch.randn(16, HQ),
        "bias": torch.randn(B, HQ, TQ, TK),
        "shared": torch.randn(TQ, TK),
        "emb": torch.randn(4, HQ),
        "gate": torch.rand(()),
        "of_q": torch.randn(B, TQ),
        "of_k": torch.randn(TK),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in floats.items()} | {
        "seg": torch.randint(0, 3, (B, TK)),
        "edge": torch.randint(0, 4, (B, TQ, TK)),
    }


#: From captured tensors to a score_mod.
MODS: dict[str, Callable[[dict[str, Tensor]], Mod]] = {
    "identity": lambda t: lambda s, b, h, q, k: s,
    "constant": lambda t: lambda s, b, h, q, k: torch.zeros_like(s) + h,
    "alibi": lambda t: lambda s, b, h, q, k: s - t["slopes"][h] * (q - k).abs(),
    "softcap": lambda t: lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
    "causal": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "relative": lambda t: lambda s, b, h, q, k: s + t["table"][(k - q).abs().clamp(max=15), h],
    "bias": lambda t: lambda s, b, h, q, k: s + t["bias"][b, h, q, k],
    "bias by steps": lambda t: lambda s, b, h, q, k: s + t["bias"][b][h][q][k],
    "transposed bias": lambda t: lambda s, b, h, q, k: s + t["shared"].t()[k, q],
    "rows and columns": lambda t: lambda s, b, h, q, k: s * t["of_q"][b, q] + t["of_k"][k],
    "documents": lambda t: (
        lambda s, b, h, q, k: torch.where(t["seg"][b, q] == t["seg"][b, k], s, s - 2)
    ),
    "edges": lambda t: lambda s, b, h, q, k: s + t["emb"][t["edge"][b, q, k], h],
    "edges from the end": lambda t: lambda s, b, h, q, k: s + t["emb"][-1 - t["edge"][b, q, k], h],
    "gate": lambda t: lambda s, b, h, q, k: s * torch.sigmoid(1 - t["gate"] * (q - k).abs() / 9),
    "windows": lambda t: lambda s, b, h, q, k: s + t["table"][(q // 5 - k // 7) % 16, h],
    "integers": lambda t: lambda s, b, h, q, k: s / (1.0 + q * k % 7) + ((q ^ k) & 3) - (q * 3 | k),
    "branches": lambda t: (
        lambda s, b, h, q, k: torch.where(
            ((q - k > 2) | (b == 1)) & ~(h == 0), s.square(), torch.minimum(s, 0.1 * s)
        )
    ),
    "clamped": lambda t: lambda s, b, h, q, k: s.clamp(-1, 1) + torch.relu(s) * t["gate"],
    "longer": lambda t: lambda s, b, h, q, k: s + t["of_k"][q] * t["of_q"][b, h] + t["emb"][h, 1],
    "temperature": lambda t: lambda s, b, h, q, k: s / (1 + t["of_k"][k].exp() * t["slopes"][h]),
    "masked": lambda t: lambda s, b, h, q, k: s.masked_fill(q % 2 == k % 2, -1.5),
    "sums of truth values": lambda t: (
        lambda s, b, h, q, k: s + ((q >= k) + (k > 9)).float() - ((q >= k) * (k > 9)).float()
    ),
    "buckets": lambda t: lambda s, b, h, q, k: s + t["table"][torch.log2(k + 1.0).long(), h],
    "shifts": lambda t: lambda s, b, h, q, k: s + t["table"][((k << 1) >> 4) % 16, h],
    "detached": lambda t: lambda s, b, h, q, k: s * s.detach().sigmoid(),
}
#: Functions of one number, each with a score_mod that is smooth where scores lie.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": lambda s: torch.log(s * s + 0.5),
    "log2": lambda s: (s * s + 0.5).log2(),
    "log1p": lambda s: torch.log1p(s * s),
    "sqrt": lambda s: torch.sqrt(s * s + 1),
    "rsqrt": lambda s: (s * s + 1).rsqrt(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "softplus": torch.nn.functional.softplus,
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": lambda s: s * torch.sign(s),
    "floor": lambda s: s + torch.floor(s),
    "ceil": lambda s: s + torch.ceil(s),
    "round": lambda s: s * 2 - torch.round(s),
    "trunc": lambda s: s - torch.trunc(s),
    "square": torch.square,
    "reciprocal": lambda s: torch.reciprocal(s * s + 1),
    "cube": lambda s: s**3,
    "power": lambda s: (s * s + 1) ** 1.3,
    "powers": lambda s: 1.5 ** (s * 0.3),
    "maximum": lambda s: torch.maximum(s, -0.5 * s),
    "divide": lambda s: 1 / (2 + s * s) - s / 3,
    "remainder": lambda s: (s * 2) % 3 + s.detach() // 2,
    "integer": lambda s: s * s.to(torch.int64).abs(),
}


def _qkv(dtype: torch.dtype = torch.float64, tq: int = TQ, tk: int = TK) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    shapes = ((B, tq, HQ, D), (B, tk, HKV, D), (B, tk, HKV, D))
    return tuple(torch.randn(*s, dtype=dtype).requires_grad_() for s in shapes)


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    grad = torch.randn(out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


def _assert_same(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_the_definition(name: str, causal: bool) -> None:
    tensors = _tensors()
    q, k, v = _qkv()
    leaves = [q, k, v, *(t for t in tensors.values() if t.requires_grad)]
    mod = MODS[name](tensors)
    found, wanted = (
        function(q, k, v, score_mod=mod, causal=causal)
        for function in (F.attention, reference.attention)
    )
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    _assert_same([found, *_gradients(found, leaves)], [wanted, *_gradients(wanted, leaves)])


@pytest.mark.parametrize("name", [n for n in MODS if n != "constant"])
def test_values_are_those_of_flex_attention(name: str) -> None:
    tensors = {n: t.detach() for n, t in _tensors().items()}
    q, k, v = (t.detach() for t in _qkv())
    mod = MODS[name](tensors)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    wanted = flex_attention(*heads_first, score_mod=mod, enable_gqa=True).transpose(1, 2)
    _assert_same([F.attention(q, k, v, score_mod=mod)], [wanted])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_function(name: str, dtype: torch.dtype) -> None:
    q, k, v = _qkv(dtype, 20, 70)
    function = FUNCTIONS[name]

    def of_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(s)

    def of_position(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + function((k - q).to(s.dtype) / 40 + 0.25)

    for mod in (of_score, of_position):
        both = [
            attention(q, k, v, score_mod=mod) for attention in (F.attention, reference.attention)
        ]
        found, wanted = ([o, *_gradients(o, [q, k, v])] for o in both)
        _assert_same(found, wanted, 1e-11 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("name", ["alibi", "edges", "gate", "windows", "documents"])
def test_gradcheck(name: str) -> None:
    tensors = _tensors()
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
    q, k, v = _qkv()
    tensors = _tensors()
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
    found, wanted = ([o, *_gradients(o, leaves)] for o in both)
    _assert_same(found, wanted)


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
    _assert_same(*([o, *_gradients(o, leaves)] for o in both))
    for n, (first, last) in enumerate(itertools.pairwise(cu)):
        alone = F.attention(
            *(t[None, first:last] for t in (q, k, v)),
            score_mod=lambda s, b, h, q, k, n=n: mod(s, b + n, h, q, k),
        )
        _assert_same([both[0][first:last]], [alone[0]])


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
    _assert_same([both[0]], [both[1]])
    alone = F.attention(
        q[:1],
        *(t[:1, :200] for t in whole),
        score_mod=lambda s, b, h, i, k: mod(s, b, h, i + 200 - queries, k),
        causal=True,
    )
    _assert_same([both[0][:1]], [alone])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["bias", "gate", "relative", "edges"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    tensors = {n: t.detach() for n, t in _tensors(dtype).items()}
    q, k, v = (t.detach().to(dtype) for t in _qkv())
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    wanted = F.attention(q.double(), k.double(), v.double(), score_mod=MODS[name](wide))
    found = F.attention(q, k, v, score_mod=MODS[name](tensors))
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


def test_numbers_do_not_depend_on_threads() -> None:
    tensors = _tensors(torch.float32)
    q, k, v = (t.detach().float().requires_grad_() for t in _qkv(tq=TQ))
    leaves = [q, k, v, *(t for t in tensors.values() if t.requires_grad)]

    def mod(s: Tensor, *places: Tensor) -> Tensor:
        for name in ("alibi", "edges", "rows and columns", "windows", "bias"):
            s = MODS[name](tensors)(s, *places)
        return s

    def run(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = F.attention(q, k, v, score_mod=mod)
            return [out, *_gradients(out, leaves)]
        finally:
            torch.set_num_threads(before)

    one, four = run(1), run(4)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


def test_outside_a_tensor_is_nan() -> None:
    q, k, v = _qkv()
    table = torch.randn(8, dtype=torch.float64)
    for index in (lambda q, k: q - k, lambda q, k: q // 3 * k // 2):
        out = F.attention(
            q, k, v, score_mod=lambda s, b, h, q, k, index=index: s + table[index(q, k)]
        )
        assert isinstance(out, Tensor) and out.isnan().any()


def test_second_derivatives_and_weights() -> None:
    tensors = _tensors()
    q, k, v = _qkv(tq=3, tk=5)
    mod = MODS["gate"](tensors)
    out, lse = F.attention(q, k, v, score_mod=mod, return_lse=True)
    weights = F.attention_weights(q, k, lse, score_mod=mod)
    values = v.repeat_interleave(HQ // HKV, 2)
    _assert_same([torch.einsum("bhqk,bkhd->bqhd", weights, values)], [out])


def test_compiles_without_breaks() -> None:
    tensors = _tensors(torch.float32)
    q, k, v = (t.detach().float().requires_grad_() for t in _qkv())
    leaves = [q, k, v, tensors["slopes"], tensors["emb"]]

    def call(q: Tensor, k: Tensor, v: Tensor, edge: Tensor) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s - tensors["slopes"][h] * (q - k).abs()
            return s + tensors["emb"][edge[b, q, k], h]

        return F.attention(q, k, v, score_mod=mod)

    wanted = call(q, k, v, tensors["edge"])
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, tensors["edge"])
    _assert_same([found, *_gradients(found, leaves)], [wanted, *_gradients(wanted, leaves)], 1e-6)


def test_exports() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.rand(HQ))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return F.attention(
                q, k, v, score_mod=lambda s, b, h, q, k: s - self.slopes[h] * (q - k).abs()
            )

    q, k, v = (t.detach().float() for t in _qkv())
    layer = Layer()
    for strict in (False, True):
        exported = torch.export.export(layer, (q, k, v), strict=strict).module()
        _assert_same([exported(q, k, v)], [layer(q, k, v)])


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda s, b, h, q, k: s if q > k else -s, "branch"),
        (lambda s, b, h, q, k: s + math.sin(q), "Python number"),
        (lambda s, b, h, q, k: torch.bessel_j0(s) if False else torch.lgamma(s), "lgamma"),
        (lambda s, b, h, q, k: s + torch.ones(3), "shape"),
        (lambda s, b, h, q, k: s + torch.ones(3, 4)[h], "indexed in all dimensions"),
        (lambda s, b, h, q, k: s + torch.ones(3)[s], "integers"),
        (lambda s, b, h, q, k: "text", "text"),
        (lambda s, b, h, q, k: s.half(), "half"),
        (lambda s, b, h, q, k: s.mean(), "mean"),
        (lambda s, b, h, q, k: s + torch.ones(3, 4)[h].sum(), "indexed in all dimensions"),
        (lambda s, b, h, q, k: torch.add(s, s, alpha=2), r"add\(Value, Value, alpha=...\)"),
        (lambda s, b, h, q, k: s + ((q >= k) - (k > 9)), "subtract truth values"),
        (lambda s, b, h, q, k: s + (q >> k), "constant number of bits"),
        (lambda s, b, h, q, k: s.to(torch.bfloat16), "bfloat16"),
    ],
)
def test_what_cannot_be_traced_is_named(mod: Any, message: str) -> None:
    q, k, v = _qkv()
    with pytest.raises(NotImplementedError, match=message):
        F.attention(q, k, v, score_mod=mod)


def test_integers_of_captured_tensors_are_not_cut() -> None:
    q, k, v = (t.detach() for t in _qkv())
    ids = torch.tensor([5, 2**32 + 5])

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(ids[k % 2] == 5, s, -s)

    _assert_same(
        [F.attention(q, k, v, score_mod=mod)], [reference.attention(q, k, v, score_mod=mod)]
    )
    with pytest.raises(RuntimeError, match="attention: int64 tensors of score_mod must fit"):
        F.attention(q.float(), k.float(), v.float(), score_mod=mod)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log2_is_exact_at_powers_of_two(dtype: torch.dtype) -> None:
    powers = torch.exp2(torch.arange(31.0, dtype=torch.float64)).to(dtype)
    q, k, v = (torch.ones(1, 31, 1, n, dtype=dtype) for n in (1, 1, 31))

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_score = torch.log2(s * powers[k]).long() == k
        return torch.where(of_score & (torch.log2(powers[k]).long() == k), 0.0, -torch.inf)

    v = v / v.shape[1]
    found = F.attention(q, k, v, scale=1.0, score_mod=mod)
    torch.testing.assert_close(found, torch.full_like(found, 1 / 31))
    assert torch.isfinite(
        F.attention(q, k, v, score_mod=lambda s, *_: s * 0 + torch.log2(s * 4)).sum()
    )


@pytest.mark.parametrize("with_mod", [False, True])
def test_a_function_is_a_mask(with_mod: bool) -> None:
    tensors = _tensors()
    q, k, v = _qkv()
    seg = tensors["seg"]
    mod = MODS["gate"](tensors) if with_mod else None

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (seg[b, q] == seg[b, k]) | (k < h) & (q >= 3)

    dense = masks.from_predicate(mask, TQ, TK, batch=B, heads=HQ)
    found, wanted = (
        [o, *_gradients(o, [q, k, v])]
        for o in (F.attention(q, k, v, mask=m, score_mod=mod) for m in (mask, dense))
    )
    _assert_same(found, wanted)
    _assert_same([reference.attention(q, k, v, mask=mask, score_mod=mod)], wanted[:1])


def _windows() -> tuple[masks.Mask, masks.Mask, masks.Mask]:
    ids = torch.randint(0, 3, (B, TK))
    return masks.SlidingWindow(9, 4), masks.Documents(ids[:, :TQ], ids), masks.EveryKth(7, False)


def test_masks_have_or_and_not() -> None:
    q, k, v = _qkv()
    a, b, c = _windows()
    mask = (a | ~b) & ~(c & b)
    x, y, z = (m.dense(TQ, TK) for m in (a, b, c))
    dense = (x | ~y) & ~(z & y)
    assert torch.equal(mask.dense(TQ, TK).expand(B, 1, TQ, TK), dense)
    assert mask.count(TQ, TK, batch=B) == int(dense.sum())
    for room in (F, reference):
        _assert_same([room.attention(q, k, v, mask=mask)], [F.attention(q, k, v, mask=dense)])
    compiled = torch.compile(lambda *x: F.attention(*x, mask=mask), fullgraph=True, backend="eager")
    _assert_same([compiled(q, k, v)], [F.attention(q, k, v, mask=dense)])
    with pytest.raises(ValueError, match="one length"):
        F.attention_cached(q, k, v, torch.full((B,), TK), mask=mask)
    with pytest.raises(TypeError, match="AnyOf"):
        a | dense  # type: ignore[operator]


def test_a_block_mask_is_a_mask() -> None:
    q, k, v = (t.detach() for t in _qkv(tq=TK))
    seg = torch.randint(0, 3, (B, TK))

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (seg[b, q] == seg[b, k]) & (q >= k) | (k < 20)

    for size in (128, 16, 48):
        block_mask = create_block_mask(mod, B, None, TK, TK, device="cpu", BLOCK_SIZE=size)
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        wanted = flex_attention(*heads_first, block_mask=block_mask, enable_gqa=True)
        mask = masks.from_block_mask(block_mask)
        _assert_same([F.attention(q, k, v, mask=mask)], [wanted.transpose(1, 2)])
    with pytest.raises(TypeError, match="BlockMask"):
        masks.from_block_mask(seg)  # type: ignore[arg-type]


def _chain(s: Tensor, *_: Tensor) -> Tensor:
    for n in range(1000):
        s = torch.tanh(s) * (1 + n / 500)
    return s


def _sum_of_many(s: Tensor, *_: Tensor) -> Tensor:
    terms = [torch.sin(s * (n / 50)) for n in range(1, 101)]
    found = terms[0]
    for term in terms[1:]:
        found = term + found * 0.9
    return found


def _used_twice(s: Tensor, *_: Tensor) -> Tensor:
    terms = [torch.sin(s * (n / 50)) for n in range(1, 71)]
    for term in terms + terms:
        s = torch.tanh(s + term)
    return s


@pytest.mark.parametrize("mod", [_chain, _sum_of_many])
def test_long_programs(mod: Mod) -> None:
    """More values than registers are kept by computing some of them again."""
    q, k, v = _qkv(tq=3, tk=5)
    both = [f(q, k, v, score_mod=mod) for f in (F.attention, reference.attention)]
    _assert_same(*([o, *_gradients(o, [q, k, v])] for o in both))


def test_programs_that_are_too_wide() -> None:
    q, k, v = _qkv(tq=3, tk=5)
    with pytest.raises(ValueError, match="may keep 64 values at once, got 8"):
        F.attention(q, k, v, score_mod=_used_twice)


def test_what_a_function_reads_may_change() -> None:
    """Nothing that a call made is taken for another."""
    q, k, v = (t.detach() for t in _qkv(tq=9, tk=9))
    read: dict[str, Any] = {"number": 0.5, "tensor": torch.randn(HQ).double(), "causal": True}

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = (q - k).abs().to(s.dtype)
        s = s * read["number"] + read["tensor"][h] * torch.sqrt(distance + read["number"])
        return torch.where(q >= k, s, -torch.inf) if read["causal"] else s

    def check() -> None:
        wanted = reference.attention(q, k, v, score_mod=mod)
        _assert_same([F.attention(q, k, v, score_mod=mod)], [wanted])

    check()
    read["number"] = 2
    check()
    read["tensor"].mul_(-2)
    check()
    read["tensor"] = torch.randn(HQ + 1, dtype=torch.float64).requires_grad_()
    check()
    read["causal"] = False
    check()
    q = q[:, :5]
    check()


def test_what_calls_keep_fits_every_mode() -> None:
    """Tables of positions that were made in one mode serve the others."""
    q, k, v = (t.detach() for t in _qkv(tq=6, tk=6))

    def call(q: Tensor) -> Any:
        return F.attention(q, k, v, score_mod=MODS["gate"]({"gate": torch.tensor(0.7)}))

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert call(fake.from_tensor(q)).shape == q.shape
    with torch.inference_mode():
        wanted = call(q)
    transformed = torch.func.grad(lambda q: call(q).sum())(q)
    leaf = q.clone().requires_grad_()
    _assert_same([call(leaf)], [wanted])
    _assert_same(torch.autograd.grad(call(leaf).sum(), leaf), [transformed])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_pairs_give_nothing_to_gradients(bad: float) -> None:
    """Whatever tensors hold where the mask hides."""
    tensors = _tensors()
    q, k, v = _qkv(tq=TK, tk=TK)
    mask = torch.rand(TK, TK) < 0.5
    mask[:, 7] = False
    mask[:, 0] = True
    mask[3] = True
    mask[3, 7] = False
    square = torch.randn(TK, TK, dtype=torch.float64)
    of_k = torch.randn(TK, dtype=torch.float64)
    codes = torch.randint(0, 3, (TK, TK)).where(mask, 3)
    table = torch.tensor([0.3, -0.5, 1.0, bad], dtype=torch.float64)

    def run(square: Tensor, of_k: Tensor, table: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (square, of_k, table)]
        a, b, c = leaves

        def mod(s: Tensor, _: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            found = torch.tanh(s * a[q, k]) + torch.exp(b[k]) * s
            return found + s * c[codes[q, k]] * tensors["slopes"][h]

        out = F.attention(q, k, v, mask=mask, score_mod=mod)
        return [out, *_gradients(out, [q, k, v, tensors["slopes"], *leaves])]

    wanted = run(square, of_k, table.nan_to_num(posinf=0.0))
    of_k[7] = bad
    found = run(square.where(mask, bad), of_k, table)
    assert found[-2][7].isnan()  # of torch's exp
    found[-2][7] = wanted[-2][7]
    _assert_same(found, wanted)


def test_not_a_function() -> None:
    q, k, v = _qkv()
    with pytest.raises(TypeError, match="score_mod must be a function"):
        F.attention(q, k, v, score_mod=3)  # type: ignore[arg-type]
