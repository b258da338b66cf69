"""fp16 on AMX tiles has the range and the errors of fp32 products. test_emulated_isas.py runs this
file on software tiles; elsewhere it compares a level with itself."""

from functools import partial

import pytest
import torch

from omniattn import testing
from omniattn.functional import attention, linear_cross_entropy, moe_experts
from omniattn.testing.properties import PROPERTIES

#: The level of products in fp32.
BELOW = [isa for isa in testing.isas() if not isa.startswith("amx_")][-1]


def random(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def errors_of_level(name, function, tensors, grad):
    """Roots of the mean squares of the errors of fp16 results and gradients against fp64."""

    def results(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    with testing.isa(name):
        found = results(torch.float16)
    exact = results(torch.float64)
    assert all(t.isfinite().all() for t in found)
    return torch.stack([(a - b).square().mean().sqrt() for a, b in zip(found, exact, strict=True)])


def assert_errors_of_vectors(function, tensors, grad):
    """Tiles add at most a hundredth to the errors of fp32 products, which round results alone."""
    tensors = [t.half() for t in tensors]
    ours = errors_of_level(testing.isas()[-1], function, tensors, grad.half())
    theirs = errors_of_level(BELOW, function, tensors, grad.half())
    assert (ours <= 1.01 * theirs).all(), (ours, theirs)


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (6, 1, 1, 1), (2**-6, 2**6, 2**-10, 2**-6), (2**-3, 2**-3, 2**8, 2**8)],
    ids=["like 1", "peaked", "small dS", "large dS"],
)
def test_errors_of_fp16_attention_are_those_of_fp32_products(sizes):
    """Also where dP and dS do not fit fp16, or are denormals of it."""
    found = random(*((1, 300, heads, 64) for heads in (4, 2, 2, 4)))
    q, k, v, grad = (t * size for t, size in zip(found, sizes, strict=True))
    assert_errors_of_vectors(partial(attention, causal=True), (q, k, v), grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2**9, 2**-14, 2**-16), (2**-11, 2**5, 2**-4)],
    ids=["like 1", "large hidden", "small hidden"],
)
def test_errors_of_fp16_experts_are_those_of_fp32_products(sizes, transposed):
    """Also where hidden layers and their gradients do not fit fp16."""
    x, up, down, grad = random((40, 48), (3, 70, 48), (3, 48, 35), (40, 48))
    tensors = [x * sizes[0], up, down * sizes[1]]
    if transposed:
        tensors[1:] = (t.mT.contiguous().mT for t in tensors[1:])
    index = torch.arange(40)[:, None] % 3  # experts of 14 tokens, and of 13

    def function(x, up, down):
        return moe_experts(x, index, torch.ones(index.shape), up, down, activation="bilinear")

    assert_errors_of_vectors(function, tensors, grad * sizes[2])


def test_errors_of_an_fp16_linear_loss_are_those_of_fp32_products():
    x, weight = random((64, 96), (300, 96))
    target = torch.arange(64) % 300
    assert_errors_of_vectors(
        lambda x, weight: linear_cross_entropy(x, weight, target), (x, weight), torch.ones(())
    )


@pytest.mark.parametrize("op", ["attention", "selected_attention", "moe_experts", "linear"])
@pytest.mark.parametrize("check", ["strided", "poisoned", "deterministic"])
def test_fp16_has_the_properties_of_other_dtypes(check, op):
    """The tests of OpSpecs run these properties in fp32 and bf16 only."""
    spec = testing.registry()[op]
    PROPERTIES[check](spec, spec.cases[1], torch.float16)
