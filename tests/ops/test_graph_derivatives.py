"""torch.func inside torch.compile: right derivatives, or an error that says what to write instead.

A registered op has none there: torch.library makes no function for torch.func, and its tangents
would be zeros.
"""

import pytest
import torch

from omniattn.functional import attention, attention_varlen, rms_norm

CU = torch.tensor([0, 5, 12])


def packed(x):
    rows = x.view(-1, 2, 4)
    sizes = {"max_seqlen_q": 7, "max_seqlen_k": 7}
    return attention_varlen(rows, rows, rows, CU, CU, **sizes).square().sum()


def whole(x):
    rows = x.view(1, -1, 2, 4)
    return attention(rows, rows, rows, causal=True).square().sum()


FUNCTIONS = [packed, whole, lambda x: rms_norm(x).exp().sum()]
FULL = {"fullgraph": True, "backend": "aot_eager"}


@pytest.mark.parametrize("function", FUNCTIONS, ids=["varlen", "attention", "rms_norm"])
def test_derivatives_in_graphs(function):
    x = torch.randn(12, 8, dtype=torch.float64)

    def gradient(x):
        return torch.func.grad(function)(x)

    def tangent(x):
        return torch.func.jvp(function, (x,), (x.sin(),))[1]

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the function alone and"):
        torch.compile(gradient, **FULL)(x)
    expected = gradient(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(x), expected)
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    (alone,) = torch.autograd.grad(torch.compile(function, **FULL)(leaf), leaf)
    torch.testing.assert_close(alone, expected)
    if function is not packed:  # whose definition reads the boundaries
        torch.testing.assert_close(torch.compile(tangent, **FULL)(x), tangent(x))


def test_vmap_in_a_graph():
    x = torch.randn(3, 1, 6, 2, 4)

    def each(x):
        return torch.func.vmap(lambda x: attention(x, x, x))(x)

    torch.testing.assert_close(torch.compile(each, **FULL)(x), each(x))
