"""The programs of score_mod: functions, long ones, errors, what they may read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from score_mods import (
    HQ,
    MODS,
    TK,
    TQ,
    Mod,
    assert_same,
    gradients_of,
    make_qkv,
    make_tensors,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import omniattn.functional as F
from omniattn import reference

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
    "softplus_beta": lambda s: torch.nn.functional.softplus(s, 3, 2.0),
    "relu": torch.nn.functional.relu,
    "leaky_relu": lambda s: torch.nn.functional.leaky_relu(s, 0.2),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda s: torch.nn.functional.gelu(s, approximate="tanh"),
    "elu": torch.nn.functional.elu,
    "elu_alpha": lambda s: torch.nn.functional.elu(s * 300, 0.5),
    "module": torch.nn.GELU(),
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
    "negative remainder": lambda s: (s * 2) % -3 - 7 % (s.detach().abs() + 0.3),
    "fmod": lambda s: torch.fmod(s * 3, 2) - torch.fmod(s * 3, -2),
    "floor_divide": lambda s: s + s.detach() // 0.317 + s.detach().floor_divide(-0.7331),
    "integer": lambda s: s * s.to(torch.int64).abs(),
    "at limits": lambda s: _at_limits(s - s.detach()),
}


def _at_limits(zero: Tensor) -> Tensor:
    """Sums of 0 whose slope depends on that of each limit."""
    both = zero.clamp(0, 1) + 2 * torch.clip(zero, min=-1, max=0) + 3 * zero.clip(max=zero)
    return both + 5 * torch.clamp_min(zero, 0) + 7 * zero.clamp_max(0.0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_function(name: str, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(dtype, 20, 70)
    function = FUNCTIONS[name]

    def of_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(s)

    def of_position(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + function((k - q).to(s.dtype) / 40 + 0.25)

    for mod in (of_score, of_position):
        both = [
            attention(q, k, v, score_mod=mod) for attention in (F.attention, reference.attention)
        ]
        found, wanted = ([o, *gradients_of(o, [q, k, v])] for o in both)
        assert_same(found, wanted, 1e-11 if dtype == torch.float64 else 1e-3)


def test_numbers_do_not_depend_on_threads() -> None:
    tensors = make_tensors(torch.float32)
    q, k, v = (t.detach().float().requires_grad_() for t in make_qkv(tq=TQ))
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
            return [out, *gradients_of(out, leaves)]
        finally:
            torch.set_num_threads(before)

    one, four = run(1), run(4)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


def test_tensors_read_at_tensors() -> None:
    """Indices that tensors hold, negative ones and those made of two, as in flex_attention."""
    q, k, v = make_qkv()
    order, near = torch.randperm(v.shape[1]), torch.randint(-4, 4, (v.shape[1],))
    table = torch.randn(v.shape[1], 4, dtype=torch.float64, requires_grad=True)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = table[order[k]]
        return s + row[near[q]] * table[order[(order[q] + k) % 50], -1] + near[order[k]]

    leaves = [q, k, v, table]
    both = [f(q, k, v, score_mod=mod) for f in (F.attention, reference.attention)]
    assert_same(*([o, *gradients_of(o, leaves)] for o in both))


def test_outside_a_tensor_is_nan() -> None:
    q, k, v = make_qkv()
    table = torch.randn(8, dtype=torch.float64)
    for index in (lambda q, k: q - k, lambda q, k: q // 3 * k // 2):
        out = F.attention(
            q, k, v, score_mod=lambda s, b, h, q, k, index=index: s + table[index(q, k)]
        )
        assert isinstance(out, Tensor) and out.isnan().any()


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
        (lambda s, b, h, q, k: torch.nn.functional.selu(s), "cannot trace selu;"),
        (lambda s, b, h, q, k: torch.nn.functional.gelu(s, approximate="x"), "cannot trace gelu"),
        (lambda s, b, h, q, k: s + torch.ones(3, 4).gather(0, q), "cannot trace gather;"),
        (lambda s, b, h, q, k: s + torch.fmod(q, 3), "div of integers"),
        (lambda s, b, h, q, k: s.mean(), "mean"),
        (lambda s, b, h, q, k: s + torch.ones(3, 4)[h].sum(), "indexed in all dimensions"),
        (lambda s, b, h, q, k: torch.add(s, s, alpha=2), r"add\(Value, Value, alpha=...\)"),
        (lambda s, b, h, q, k: s + ((q >= k) - (k > 9)), "subtract truth values"),
        (lambda s, b, h, q, k: s + (q >> k), "constant number of bits"),
        (lambda s, b, h, q, k: s.to(torch.bfloat16), "bfloat16"),
    ],
)
def test_what_cannot_be_traced_is_named(mod: Any, message: str) -> None:
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match=message):
        F.attention(q, k, v, score_mod=mod)


def test_integers_of_captured_tensors_are_not_cut() -> None:
    q, k, v = (t.detach() for t in make_qkv())
    ids = torch.tensor([5, 2**32 + 5])

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(ids[k % 2] == 5, s, -s)

    assert_same(
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
    q, k, v = make_qkv(tq=3, tk=5)
    both = [f(q, k, v, score_mod=mod) for f in (F.attention, reference.attention)]
    assert_same(*([o, *gradients_of(o, [q, k, v])] for o in both))


def test_programs_that_are_too_wide() -> None:
    q, k, v = make_qkv(tq=3, tk=5)
    with pytest.raises(ValueError, match="may keep 64 values at once, got 8"):
        F.attention(q, k, v, score_mod=_used_twice)


def test_what_a_function_reads_may_change() -> None:
    """Nothing that a call made is taken for another."""
    q, k, v = (t.detach() for t in make_qkv(tq=9, tk=9))
    read: dict[str, Any] = {"number": 0.5, "tensor": torch.randn(HQ).double(), "causal": True}

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = (q - k).abs().to(s.dtype)
        s = s * read["number"] + read["tensor"][h] * torch.sqrt(distance + read["number"])
        return torch.where(q >= k, s, -torch.inf) if read["causal"] else s

    def check() -> None:
        wanted = reference.attention(q, k, v, score_mod=mod)
        assert_same([F.attention(q, k, v, score_mod=mod)], [wanted])

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
    q, k, v = (t.detach() for t in make_qkv(tq=6, tk=6))

    def call(q: Tensor) -> Any:
        return F.attention(q, k, v, score_mod=MODS["gate"]({"gate": torch.tensor(0.7)}))

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert call(fake.from_tensor(q)).shape == q.shape
    with torch.inference_mode():
        wanted = call(q)
    transformed = torch.func.grad(lambda q: call(q).sum())(q)
    leaf = q.clone().requires_grad_()
    assert_same([call(leaf)], [wanted])
    assert_same(torch.autograd.grad(call(leaf).sum(), leaf), [transformed])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_pairs_give_nothing_to_gradients(bad: float) -> None:
    """Whatever tensors hold where the mask hides."""
    tensors = make_tensors()
    q, k, v = make_qkv(tq=TK, tk=TK)
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
        return [out, *gradients_of(out, [q, k, v, tensors["slopes"], *leaves])]

    wanted = run(square, of_k, table.nan_to_num(posinf=0.0))
    of_k[7] = bad
    found = run(square.where(mask, bad), of_k, table)
    assert found[-2][7].isnan()  # of torch's exp
    found[-2][7] = wanted[-2][7]
    assert_same(found, wanted)
