"""Subclasses of tensors, causal biases and nested tensors: taken or refused."""

import inspect
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from nested_tensors import nested
from torch.nn.attention.bias import causal_upper_left
from torch.utils._pytree import tree_map_only

from omniattn import functional as F
from omniattn.testing import registry

X = torch.ones(2, 4)
ROUTING = F.softmax_top_k(X, 2)
TARGET = torch.tensor([1, 2])


class Tagged(torch.Tensor):
    """A tensor with another name."""


class Asked(torch.Tensor):
    """Tensor whose values are elsewhere; calls of functions get them by __torch_function__."""

    @staticmethod
    def of(t):
        self = t.new_empty(t.shape).as_subclass(Asked)
        self.values_elsewhere = t
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.__dict__["values_elsewhere"], (args, kwargs))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """Tensor without memory; calls of ops get its values by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, t):
        self = torch.Tensor._make_wrapper_subclass(
            cls, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
        )
        self.inner = t
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def calls_by_tensor(spec):
    """The first case of the op with each of its tensors, by the tensor's name; not parts of them
    that only the OpSpec has."""
    known = inspect.signature(spec.function).parameters
    calls = {}
    for case in spec.cases:
        call = spec.call(case, torch.float32)
        calls = {name: call for name in call.tensors if name in known} | calls
    return calls


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("kind", [lambda t: t.as_subclass(Tagged), Asked.of, Wrapped])
def test_a_subclass_is_its_tensor_or_refused(spec, kind):
    for name, call in calls_by_tensor(spec).items():
        torch.manual_seed(0)
        want = call.run(spec.function)
        tensors = {**call.tensors, name: kind(call.tensors[name])}
        torch.manual_seed(0)
        try:
            got = replace(call, tensors=tensors).run(spec.function)
        except RuntimeError as error:  # the dispatcher does not see what is in optional lists
            assert kind is Wrapped
            assert "with memory of its own" in str(error)
            continue
        got = [t.as_subclass(torch.Tensor) for t in got]
        torch.testing.assert_close(got, list(want), rtol=0, atol=0, msg=f"{spec.name}: {name}")


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_causal_bias_is_a_mask_alone(spec, backend):
    """torch's CausalBias has memory, which is uninitialised."""
    for name, call in calls_by_tensor(spec).items():
        if name in ("mask", "attn_mask") and spec.family == "attention":
            continue
        shape = call.tensors[name].shape
        bias = causal_upper_left(*shape[-2:]) if len(shape) > 1 else causal_upper_left(1, *shape)
        call = replace(call, tensors={**call.tensors, name: bias})
        with pytest.raises((TypeError, ValueError)) as caught:
            call.run(partial(spec.function, backend=backend))
        assert re.match(rf"{spec.name}: .*{name}", str(caught.value))


# Functions without an OpSpec that take tensors of tokens or of pairs.
ROWS = nested(torch.rand(2, 3, 4))


HEADS = nested(torch.rand(2, 3, 2, 4))


PAIRS = nested(torch.rand(2, 3))


STRIDED = torch.nested.nested_tensor([torch.rand(3)] * 2)


NESTED_CALLS = {
    "alibi_bias": lambda: F.alibi_bias(PAIRS, 3, 3),
    "cv_squared": lambda: F.cv_squared(ROWS),
    "dpo_loss": lambda: F.dpo_loss(PAIRS, PAIRS, PAIRS, PAIRS),
    "expert_choice": lambda: F.expert_choice(ROWS, 2),
    "fft_conv": lambda: F.fft_conv(ROWS, X),
    "interpolate_positions": lambda: F.interpolate_positions(ROWS, 3),
    "llama4_top_k": lambda: F.llama4_top_k(ROWS, 2),
    "load_balance_loss": lambda: F.load_balance_loss(ROWS, ROUTING),
    "masked_positions": lambda: F.masked_positions(ROWS.long()),
    "merge_attention": lambda: F.merge_attention([HEADS], [ROWS]),
    "noisy_top_k": lambda: F.noisy_top_k(ROWS, ROWS, 2),
    "normal_like": lambda: F.normal_like(ROWS),
    "orpo_loss": lambda: F.orpo_loss(PAIRS, PAIRS),
    "rotary_tables": lambda: F.rotary_tables(F.rope_frequencies(4), PAIRS.long()),
    "router_z_loss": lambda: F.router_z_loss(ROWS),
    "s4d": lambda: F.s4d(ROWS, ROWS, ROWS, ROWS, ROWS),
    "selective_scan": lambda: F.selective_scan(
        X[None], X[None], STRIDED.cfloat(), X[None], X[None]
    ),
    "sequence_log_prob": lambda: F.sequence_log_prob(HEADS, TARGET[None]),
    "sigmoid_top_k": lambda: F.sigmoid_top_k(ROWS, 2),
    "simpo_loss": lambda: F.simpo_loss(PAIRS, PAIRS),
    "softmax_top_k": lambda: F.softmax_top_k(ROWS, 2),
    "ssm_recurrence": lambda: F.ssm_recurrence(ROWS, X, X, X),
    "top_k_softmax": lambda: F.top_k_softmax(ROWS, 2),
}


@pytest.mark.parametrize("name", NESTED_CALLS)
def test_a_nested_tensor_is_refused_where_no_spec_says_so(name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        NESTED_CALLS[name]()


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_nested_tensor_is_taken_or_refused(spec, backend):
    for name, call in calls_by_tensor(spec).items():
        t = call.tensors[name]
        if t.dim() < 2 or 0 in t.shape:  # no nested tensor has this form
            continue
        call = replace(call, tensors={**call.tensors, name: nested(t)})
        try:
            call.run(partial(spec.function, backend=backend))
        except (TypeError, ValueError) as error:
            assert re.match(f"({spec.name}|BoolMask): ", str(error)), error
