"""Compiled calls with gradients (csrc/calls/gradients.h) do what `EagerOp` does in Python."""

import gc
import threading
import weakref
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from omniattn import functional as F
from omniattn.ops.attention import attention
from omniattn.ops.dispatch import calls
from omniattn.ops.norm import add_norm, norm
from omniattn.ops.recurrence import recurrence
from omniattn.ops.rope import rope

pytestmark = pytest.mark.skipif(calls.compiled is None, reason=str(calls.why_not_compiled()))

X = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)
W = torch.linspace(0.5, 2, 4, dtype=torch.float64)
HEADS = [
    torch.randn(2, 5, 2, 4, dtype=torch.float64, generator=torch.manual_seed(i)) for i in (1, 2, 3)
]
BIAS = torch.randn(1, 1, 5, 5, dtype=torch.float64, generator=torch.manual_seed(4))


CASES = {
    "norm": (norm, (X, W, None, False, 1e-6, 0.0, False)),  # a backward op
    "add_norm": (add_norm, (X, X + 1, W, W, True, 1e-6, 0.0, False)),  # a backward in Python
    "recurrence": (recurrence, (*HEADS, *[None] * 10, 0.5, False, 0, False, 0.0, False)),
    "rope": (
        rope,
        (HEADS[0], HEADS[1], HEADS[2][0, :, 0, :2], HEADS[2][1, :, 0, :2], None, 0, False, False),
    ),
}


def leaves_of(args, wanted=()):
    """Returns the arguments with new leaves for the tensors, of which `wanted` need a gradient."""
    new, leaves = [], []
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            a = a.detach().clone()
            if i in wanted:
                leaves.append(a.requires_grad_())
        new.append(a)
    return new, leaves


def results(record, args, wanted, weigh):
    new, leaves = leaves_of(args, wanted)
    outputs = record(*new)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((weigh * o.sin()).sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_python(name):
    op, args = CASES[name]
    tensors = [
        i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()
    ]
    differentiable = [i for i in tensors if name != "rope" or i < 2]
    for flags in product((False, True), repeat=len(differentiable)):
        wanted = [i for i, flag in zip(differentiable, flags, strict=True) if flag]
        if not wanted:
            continue
        expected, found = (results(r, args, wanted, 0.7) for r in (op._record, op.record))
        assert len(expected) == len(found)
        for a, b in zip(expected, found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    ("use", "enters_python"),
    [
        (lambda q, k: F.attention(q, k, q, causal=True), False),
        (lambda q, k: F.attention(q, k, q, return_lse=True)[1], True),  # out has no gradient
        (lambda q, k: F.attention(q, k, q, bias=BIAS), True),
        (lambda q, k: F.attention(q, k, q, bias=k[:1, :, 0] @ k[:1, :, 1].mT), True),
    ],
    ids=["plain", "lse", "bias", "gradient of bias"],
)
def test_attention(monkeypatch, use, enters_python):
    def gradients():
        q, k = (t.clone().requires_grad_() for t in HEADS[:2])
        return torch.autograd.grad(use(q, k).sin().sum(), (q, k))

    asked, ask = [], attention.gradients_of_call
    monkeypatch.setattr(attention, "gradients_of_call", lambda *a: asked.append(a) or ask(*a))
    found = gradients()
    assert bool(asked) is enters_python
    monkeypatch.setattr(attention, "attempt", attention._attempt)
    monkeypatch.setattr(attention, "record", attention._record)
    asked.clear()
    for a, b in zip(gradients(), found, strict=True):
        assert torch.equal(a, b)
    assert not asked


def test_second_derivatives():
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(F.rms_norm, (x, weight))
    q, k, v = (t.clone().requires_grad_() for t in HEADS)
    assert torch.autograd.gradgradcheck(lambda *a: F.attention(*a, causal=True), (q, k, v))


def test_a_graph_is_freed_or_retained():
    x = X.clone().requires_grad_()
    y = F.rms_norm(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(y, x))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


def test_a_changed_input_is_noticed():
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = F.rms_norm(x, weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_errors_of_a_backward_keep_their_class(monkeypatch):
    class Broken(ValueError):
        pass

    def gradients(*args):
        raise Broken("here")

    monkeypatch.setattr(type(add_norm), "gradients_of_call", gradients)
    x = X.clone().requires_grad_()
    y, _ = F.rms_norm(x, residual=X)
    with pytest.raises(Broken, match="here"):
        y.sum().backward()


def test_tensors_are_packed_and_recomputed():
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.rms_norm(x, weight).sum(), x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or (t * 2,), lambda pair: pair[0] / 2
    ):
        y = F.rms_norm(x, weight)
    assert len(packed) == 3
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    y = checkpoint(F.rms_norm, x, weight, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_hook_that_raises_ends_the_call():
    class Full(MemoryError):
        pass

    def pack(t):
        raise Full

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(Full):
        F.rms_norm(x)


def test_batched_gradients():
    x = X.clone().requires_grad_()
    y = F.rms_norm(x)
    grads = torch.stack([torch.ones_like(y), torch.arange(12.0, dtype=y.dtype).reshape(3, 4)])
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(y, x, grad, retain_graph=True)[0], found)


@pytest.mark.parametrize("record", [True, False], ids=["compiled", "python"])
def test_batched_gradients_of_an_op_with_lists(monkeypatch, record):
    if not record:
        monkeypatch.setattr(attention, "attempt", attention._attempt)
        monkeypatch.setattr(attention, "record", attention._record)
    q = HEADS[0].clone().requires_grad_()
    y = F.attention(q, q, q, bias=BIAS)
    grads = torch.stack(HEADS)
    (batched,) = torch.autograd.grad(y, q, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(y, q, grad, retain_graph=True)[0], found)


@pytest.mark.parametrize(
    "function",
    [
        lambda q: F.rms_norm(q, W),
        lambda q: F.attention(q, q, q, causal=True),
        lambda q: F.attention(q, q, q, bias=BIAS),
        lambda q: F.gated_delta_rule(q, q, q, -q[..., 0].abs(), q[..., 0].sigmoid())[0],
    ],
)
def test_compiled_autograd(function):
    def gradient():
        q = HEADS[0].clone().requires_grad_()
        function(q).sin().sum().backward()
        return q.grad

    expected = gradient()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert torch.equal(gradient(), expected)


def test_outputs_without_a_gradient_in_the_loss():
    x, residual = X.clone().requires_grad_(), (X + 1).requires_grad_()
    y, h = F.rms_norm(x, residual=residual)
    assert torch.equal(torch.autograd.grad(h.sum(), x)[0], torch.ones_like(x))
    y, h = F.rms_norm(x, residual=residual)
    assert torch.autograd.grad(y.sum(), residual)[0] is not None


def test_no_reference_is_kept():
    x, parameter = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.ones(4))
    y, h = F.rms_norm(x, parameter, residual=torch.ones(3, 4))
    (y.sum() + h.sum()).backward()
    alive = [weakref.ref(t) for t in (x, y, h, parameter)]
    z = F.rms_norm(x)  # a graph that is never walked
    alive.append(weakref.ref(z))
    del x, y, h, z, parameter
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_threads_record_and_walk_at_a_time():
    found = {}

    def work(seed):
        x = torch.full((64, 64), float(seed)).add(torch.arange(64.0)).requires_grad_()
        for _ in range(50):
            y, _ = F.rms_norm(x, residual=x.detach())
            (found[seed],) = torch.autograd.grad(y.sin().sum(), x)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = dict(found)
    for seed in range(4):
        work(seed)
        assert torch.equal(found[seed], kept[seed])


@pytest.mark.filterwarnings("ignore:Error detected")
def test_anomaly_mode_names_the_call():
    x = torch.zeros(1, 4, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        (F.rms_norm(x, eps=0.0) * torch.inf).sum().backward()
