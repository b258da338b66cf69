"""check_function: a right function passes, and each kind of wrong one is told by its property."""

import pytest
import torch
from torch import nn

from omniattn import functional as F
from omniattn import reference
from omniattn.testing import OWN_PROPERTIES, check_function

pytestmark = pytest.mark.usefixtures("one_thread")
LIKE = "gated_linear_attention"
SIZES = {"B": 1, "T": 9, "H": 1, "Hv": 1, "K": 3, "V": 2, "N": 3}
PACKED = {**SIZES, "tensors": ["initial_state", "cu_seqlens"], "cases": ["tiny"]}
F32 = [torch.float32]


def right(q, k, v, g, *, initial_state=None, cu_seqlens=None):
    return reference.gated_linear_attention(
        q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def test_a_right_function_has_every_property():
    dtypes = [torch.float32, torch.bfloat16]
    given = {"dtypes": dtypes, "properties": OWN_PROPERTIES, **PACKED}
    checked = check_function(F.gated_linear_attention, LIKE, **given)
    assert set(checked) == set(OWN_PROPERTIES)
    assert checked.pop("gradcheck") == ["tiny-B2T3H1Hv1K3V2"]
    assert all(cases == ["user-B1T9H1Hv1K3V2N3"] for cases in checked.values())


def test_the_cases_are_those_of_the_op():
    checked = check_function(
        right, LIKE, dtypes=F32, cases=["tiny", "packed"], properties=["repeatable", "packed"]
    )
    assert checked["packed"] == ["packed-B1T150H2Hv2K9V16N5"]
    assert checked["repeatable"] == ["tiny-B2T3H1Hv1K3V2"]


def wrong_values(*tensors, **options):
    o, state = right(*tensors, **options)
    return o * 1.01, state


def wrong_dtype(*tensors, **options):
    return tuple(t.double() for t in right(*tensors, **options))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.5 * grad


def wrong_gradient(*tensors, **options):
    o, state = right(*tensors, **options)
    return WrongGradient.apply(o), state


def reads_storage(q, k, v, g, **options):
    q = torch.empty(0, dtype=q.dtype).set_(q.untyped_storage(), 0, q.shape) + 0 * q
    return right(q, k, v, g, **options)


def views(q, k, v, g, **options):
    return right(q.view(-1).view(q.shape), k, v, g, **options)


def leaks(q, k, v, g, *, initial_state=None, cu_seqlens=None):
    """Goes on over the boundaries, as the given definition does."""
    states = None if initial_state is None else initial_state[:1]
    o, after = right(q, k, v, g, initial_state=states)
    return o, after.expand(
        len(initial_state), *after.shape[1:]
    ) if cu_seqlens is not None else after


def uninitialised(*tensors, **options):
    o, state = right(*tensors, **options)
    poisoned = (torch.empty(2000, dtype=torch.int32) == -1).all()
    return o * (1 + poisoned), state


def random(*tensors, **options):
    o, state = right(*tensors, **options)
    return o * (1 + 1e-3 * torch.rand(())), state


@pytest.mark.parametrize(
    ("function", "properties"),
    [
        (wrong_values, {"forward"}),
        (wrong_dtype, {"forward"}),
        (wrong_gradient, {"backward", "gradcheck"}),
        (reads_storage, {"strided"}),
        (views, {"strided"}),
        (uninitialised, {"poisoned"}),
        (random, {"repeatable"}),
    ],
)
def test_a_wrong_function_is_told_by_its_property(function, properties):
    signed = lambda q, k, v, g, *, initial_state=None, cu_seqlens=None: function(  # noqa: E731
        q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    signed.__name__ = function.__name__
    with pytest.raises(AssertionError) as caught:
        check_function(signed, LIKE, dtypes=F32, properties=[*properties, "packed"], **PACKED)
    lines = [line for line in str(caught.value).splitlines() if "(like " in line]
    told = {line.split(": ")[1].split(" ")[0] for line in lines}
    assert told - {"packed"} == properties
    assert all(line.startswith(f"{function.__name__} (like {LIKE}): ") for line in lines)
    assert all(" fails in case " in line and "torch.float" in line for line in lines)
    assert "gradcheck" not in told or "Jacobian mismatch" in str(caught.value)


def test_a_leak_over_boundaries_is_found_whatever_the_definition_says():
    with pytest.raises(AssertionError, match=r"output \d of sequence \d must be that of the seq"):
        check_function(leaks, LIKE, reference=leaks, properties=["packed"], **PACKED)


def test_first_outputs_and_optional_arguments_may_be_missing():
    """A function without packing and final state, and a module."""
    checked = check_function(
        lambda q, k, v, g: F.gated_linear_attention(q, k, v, g)[0],
        LIKE,
        dtypes=F32,
        properties=["forward"],
    )
    assert len(checked["forward"]) > 2
    assert all("packed" not in case and "tiny" not in case for case in checked["forward"])

    class Layer(nn.Module):
        def forward(self, x, weight=None):
            return F.rms_norm(x, weight)

    assert "forward" in check_function(Layer(), "rms_norm", dtypes=F32, properties=["forward"])


def test_sizes_and_options_are_the_callers():
    def scaled(q, k, v, g, *, scale=None, cu_seqlens=None):
        return F.gated_linear_attention(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)

    checked = check_function(
        scaled, LIKE, dtypes=F32, tensors=["cu_seqlens"], properties=["forward"], scale=0.5, **SIZES
    )
    assert checked == {"forward": ["user-B1T9H1Hv1K3V2N3"]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"like": "gla"}, "like must be one of .*, got like='gla'"),
        (
            {"like": "random_feature_attention"},
            "like must be an op whose tensors are arguments and outputs",
        ),
        ({"properties": ["speed"]}, r"properties must be of .*, got \['speed'\]"),
        ({"cases": ["large"]}, r"cases must be of .*, got \['large'\]"),
        ({"like": "gated_linear_atention"}, "; did you mean 'gated_linear_attention'?"),
        ({"properties": ["foward"]}, "; did you mean 'forward'?"),
        ({"cases": ["tinny"]}, "; did you mean 'tiny'?"),
        ({"propertys": ["forward"]}, "must take propertys .*; did you mean 'properties'?"),
        ({"B": 1, "T": 20}, r"gated_linear_attention needs sizes .*, got none for \['H', "),
        ({**SIZES, "TK": 20}, "sizes of gated_linear_attention must be of .*, got TK=20"),
        ({"function": lambda q, k, v: v}, "must take .* by name, got none for g"),
        ({"function": lambda q, k, v, g: v, "cases": ["packed"]}, "must take .*cu_seqlens by name"),
        ({"function": lambda q, k, v, g: v, "properties": ["packed"]}, r"got \['packed'\]"),
        ({"reference": lambda q, k, v, g, **_: v}, "at most as many outputs"),
        ({"inputs": lambda g, **rest: {**rest, "x": g}}, "must take .* by name, got none for x"),
    ],
)
def test_a_wrong_call_is_named(changed, message):
    call = {"function": right, "like": LIKE, "dtypes": F32, "properties": ["forward"]}
    with pytest.raises(ValueError, match=message) as caught:
        check_function(**call | changed)
    assert str(caught.value).startswith("check_function: ")


def test_a_function_that_is_none_is_named():
    with pytest.raises(TypeError, match="function must be callable, got function of type str"):
        check_function("right", LIKE)
