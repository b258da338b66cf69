"""Compiled calls of ops (csrc/calls) do what calls in Python do, with arguments of every kind."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode

from omniattn import functional as F
from omniattn.ops import norm
from omniattn.ops.attention import attention
from omniattn.ops.dispatch import backward, calls, gemm_choice, plain
from omniattn.ops.recurrence import recurrence

X = torch.linspace(-2, 2, 12).reshape(3, 4)
NORM = (X, None, None, False, 1e-6, 0.0, False)

needs_compiled = pytest.mark.skipif(calls.compiled is None, reason=str(calls.why_not_compiled()))


class Sub(Tensor):
    pass


def uncompiled(name):
    """Returns the call of an op as it is where nothing is compiled."""
    handle = torch._C._dispatch_find_schema_or_throw(f"omniattn::{name}", "")
    return partial(torch._C._dispatch_call_boxed, handle)


def test_a_build_from_source_compiles_its_calls():
    """All test commands build from source, with this Python and this torch."""
    assert calls.compiled is not None or not calls.config.COMPILED_CALLS


@needs_compiled
@pytest.mark.parametrize(
    "change",
    [
        {},
        {0: nn.Parameter(X)},
        {0: X.as_subclass(Sub)},
        {0: X.double()},
        {0: X[:, ::2]},
        {0: X[:0]},
        {1: X[0]},
        {3: 1},  # a number for a bool
        {4: 1},  # an int for a float
        {4: torch.tensor(0.5)},
        {5: float("nan")},
        {0: None},
        {0: [X]},
        {1: 3},
        {4: "eps"},
        {4: 10**400},
    ],
    ids=str,
)
def test_a_call_equals_the_call_in_python(change):
    args = [change.get(i, a) for i, a in enumerate(NORM)]
    results = []
    for call in (uncompiled("norm_only"), norm.norm.inference):
        try:
            results.append(call(*args))
        except (RuntimeError, TypeError, ValueError) as error:
            results.append((type(error), str(error).partition("\n")[0]))
    first, second = results
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
    else:
        assert first == second


@needs_compiled
@pytest.mark.parametrize("args", [NORM[:-1], (*NORM, False), ()], ids=len)
def test_wrong_numbers_of_arguments_raise_as_in_python(args):
    with pytest.raises((RuntimeError, TypeError)) as expected:
        uncompiled("norm_only")(*args)
    with pytest.raises(expected.type) as found:
        norm.norm.inference(*args)
    assert str(found.value) == str(expected.value)


def test_keywords_are_those_of_the_schema():
    assert torch.equal(
        norm.norm.inference(*NORM[:-1], cast_first=False), norm.norm.inference(*NORM)
    )


def same(a, b):
    return torch.equal(a, b) if isinstance(a, Tensor) else all(map(same, a, b))


def test_several_outputs():
    expected, found = uncompiled("norm_raw")(*NORM), backward.private_op("norm_raw")(*NORM)
    assert type(expected) is type(found) is tuple and len(expected) == len(found) == 2
    assert same(expected, found)


def test_lists_of_tensors_and_numbers(monkeypatch):
    given, call = [], attention.inference
    monkeypatch.setattr(attention, "inference", lambda *args: given.append(args) or call(*args))
    q, documents = torch.randn(1, 2, 3, 4), torch.tensor([[0, 1]])
    F.attention(q, q, q, mask=F.masks.Documents(documents))
    (args,) = given
    assert any(isinstance(a, list) and isinstance(a[0], Tensor) for a in args)
    assert same(uncompiled("attention_only")(*args), call(*args))


def test_an_attempt_returns_the_public_outputs():
    q = torch.randn(1, 3, 2, 4)
    given = (q, q, q, *[None] * 8, None, None, 0.5, False, 0, False, 0.0, False)
    found = recurrence.attempt(*given)
    assert isinstance(found, tuple) and len(found) == 2
    assert isinstance(norm.norm.attempt(*NORM), Tensor)


def test_an_attempt_returns_none_if_the_op_refuses():
    assert norm.norm.attempt(X, X, *NORM[2:]) is None
    assert norm.norm.attempt(X.long(), *NORM[1:]) is None
    assert attention.attempt(X, X, X, None, None, None, None, [1.0, 0.0]) is None


def test_an_attempt_that_needs_gradients_has_them():
    x, weight = X.clone().requires_grad_(), nn.Parameter(X[0])
    norm.norm.attempt(x, None, *NORM[2:]).sum().backward()
    norm.norm.attempt(X, weight, *NORM[2:]).sum().backward()
    assert x.grad is not None and weight.grad is not None
    with torch.no_grad():
        assert not norm.norm.attempt(x, weight, *NORM[2:]).requires_grad


def test_a_trace_records_an_attempt():
    traced = torch.jit.trace(lambda x: F.rms_norm(x), X)
    assert "omniattn::norm" in str(traced.graph)
    torch.testing.assert_close(traced(X + 1), F.rms_norm(X + 1))


class Unlike:
    """Has the attributes of a plain tensor."""

    is_cpu, is_nested = True, False


def plain_cases():
    nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    yield from ((X,), (X, None, nn.Parameter(X)), (nn.Buffer(X),), (X.as_subclass(Sub),), (None, X))
    yield from ((X, X.to("meta")), (nested,), (X, 1.0), (Unlike(),), (X, [X]), (X.to_sparse(),))


@needs_compiled
@pytest.mark.parametrize("given", [*plain_cases()], ids=lambda given: str(len(given)))
def test_plain_tensors_are_those_of_python(given):
    assert calls.compiled.are_plain(*given) == plain._are_plain_in_python(*given)


@needs_compiled
def test_modes_and_transforms_are_those_of_python():
    seen = []

    def note(x):
        seen.append((calls.compiled.are_plain(X), plain._are_plain_in_python(X)))
        return x.sum()

    note(X)
    with torch.autocast("cpu", torch.bfloat16):
        note(X)
    with BaseTorchFunctionMode():
        note(X)
    torch.vmap(note)(X)
    torch.vmap(torch.func.grad(note))(X)
    torch.func.grad(note)(X)
    torch.func.jvp(note, (X,), (X,))
    note(X)
    assert [found for found, _ in seen] == [True, *[False] * 6, True]
    assert all(found == expected for found, expected in seen)


def test_no_tangent_is_lost():
    with forward_ad.dual_level():
        y = F.rms_norm(forward_ad.make_dual(X, X))
        assert forward_ad.unpack_dual(y).tangent is not None


@needs_compiled
def test_no_reference_is_kept():
    x = torch.randn(3, 4)
    alive = weakref.ref(x)
    none = sys.getrefcount(None)
    for _ in range(1000):
        y = norm.norm.attempt(x, *NORM[1:])
        F.linear(x, x)
        norm.norm.attempt(x, x, *NORM[2:])
    assert abs(sys.getrefcount(None) - none) < 100
    result = weakref.ref(y)
    del x, y
    gc.collect()
    assert alive() is None and result() is None


def test_threads_run_at_a_time():
    results = {}

    def work(seed):
        x = torch.full((64, 64), float(seed))
        results[seed] = [F.rms_norm(x) for _ in range(200)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, found in results.items():
        expected = F.rms_norm(torch.full((64, 64), float(seed)))
        assert all(torch.equal(y, expected) for y in found)


NEVER = {d: gemm_choice.RULES[-1] for d in gemm_choice.RULES[-1].dtypes}


@needs_compiled
@pytest.mark.parametrize(
    "given",
    [
        (X, X),
        (X, X, X[:, 0]),
        (X, X[0]),
        (X, X, X[0, :1]),
        (X[0, 0], X),
        (X, X.to_sparse()),
        (X, X.double()),
    ],
    ids=lambda given: str([tuple(t.shape) for t in given]),
)
def test_linear_of_torch_is_refused_alike(given):
    x, weight, bias = (*given, None)[:3]
    results = [F.layers.gemm._torch_linear(x, weight, bias) if x.ndim else None]
    results.append(calls.compiled.linear(x, weight, bias, NEVER, 0, False))
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None:
        assert torch.equal(*results)


def choices():
    yield from (gemm_choice.RULES[0], gemm_choice.RULES[-1])
    for least, most, rows, smallest in product((0, 40), (1 << 62, 100), ((1, 0), (2, 4)), (0, 30)):
        yield gemm_choice.Crossings(least, most, rows, "here", smallest)


@needs_compiled
@pytest.mark.parametrize("choice", choices(), ids=lambda choice: str(choice.ranges))
def test_linear_goes_to_torch_where_the_choice_says_so(choice, monkeypatch):
    weights = [torch.randn(n, 4, requires_grad=grad) for n in (3, 8) for grad in (False, True)]
    for dtype, rows, weight in product(
        (torch.float32, torch.bfloat16, torch.float64), (0, 1, 3, 9), weights
    ):
        monkeypatch.setitem(gemm_choice.CHOICE, dtype, choice)
        x, w = torch.randn(rows, 4, dtype=dtype), weight.detach().to(dtype)
        w.requires_grad_(weight.requires_grad)
        found = calls.compiled.linear(x, w, None, gemm_choice.CHOICE, 0, False)
        assert (found is None) == gemm_choice.native_is_faster(x, w)
    for settings in ((3, False), (False, False), (0, True)):
        assert calls.compiled.linear(X, X, None, NEVER, *settings) is None
    odd = torch.randn(3, 5, dtype=torch.bfloat16)
    assert calls.compiled.linear(odd, odd, None, NEVER, 0, False) is None
    torch.set_float32_matmul_precision("high")
    try:
        assert calls.compiled.linear(X, X, None, NEVER, 0, False) is None
    finally:
        torch.set_float32_matmul_precision("highest")


PROGRAM = """
import torch, omniattn
from omniattn import functional as F
from omniattn.ops.dispatch import calls
assert calls.compiled is None
torch.manual_seed(0)
x = torch.randn(2, 3, 4, 8, requires_grad=True)
y = F.swiglu(F.rms_norm(F.attention(x, x, x)), x)
y.sum().backward()
print(y.double().sum().item().hex(), x.grad.double().sum().item().hex())
"""


def test_without_them_results_are_equal():
    environment = {**os.environ, "OMNIATTN_COMPILED_CALLS": "0"}
    run = [sys.executable, "-c", PROGRAM]
    lines = subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    y = F.swiglu(F.rms_norm(F.attention(x, x, x)), x)
    y.sum().backward()
    sums = [t.double().sum().item().hex() for t in (y, x.grad)]
    assert lines.split() == sums
