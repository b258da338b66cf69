"""Feed-forward layers: what they keep, torch's products, dropout, bad input."""

import pytest
import torch

import omniattn.functional as F
from omniattn import reference


def weights(d=6, f=10, n=6, *, grad=True, dtype=torch.float32):
    shapes = ((f, d), (f, d), (n, f))
    return [torch.randn(s, dtype=dtype).mul_(0.5).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"dropout_p": 0.4}])
def test_torch_products_give_the_same(dtype, options):
    """backend=None takes torch's products for these dtypes on machines where they are faster."""
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    w = weights(dtype=dtype)
    seed = torch.tensor([3, 4])
    grad = torch.randn(2, 5, 6, dtype=dtype)
    results = []
    for backend in (None, "cpu", "reference"):
        y = F.glu_mlp(x, *w, seed=seed, backend=backend, **options)
        results.append((y, *torch.autograd.grad(y, (x, *w), grad)))
    for got in results[:2]:
        torch.testing.assert_close(got, results[2], rtol=1e-4, atol=1e-5)


def kept_elements(function, *inputs):
    """Elements that autograd keeps in addition to the inputs."""
    own = {t.untyped_storage().data_ptr() for t in inputs}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function()
    assert y.requires_grad
    return sum(kept.values())


def test_keeps_half_of_the_eager_form_and_nothing_with_recompute():
    x, w = torch.randn(7, 6, requires_grad=True), weights(f=20)
    hidden = 7 * 20

    def eager():
        gate, up = x @ w[0].T, x @ w[1].T
        return (torch.nn.functional.silu(gate) * up) @ w[2].T

    assert kept_elements(eager, x, *w) == 4 * hidden
    assert kept_elements(lambda: F.glu_mlp(x, *w), x, *w) == 2 * hidden
    assert kept_elements(lambda: F.glu_mlp(x, *w, recompute=True), x, *w) == 0
    assert kept_elements(lambda: F.mlp(x, w[0], w[2]), x, *w) == hidden


def test_dropout_is_a_function_of_the_seed():
    x, w = torch.randn(50, 6), weights(grad=False)
    one, same, other = (
        F.glu_mlp(x, *w, dropout_p=0.5, seed=torch.tensor([s, 0])) for s in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    torch.manual_seed(5)
    drawn = F.mlp(x, w[0], w[2], dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(drawn, F.mlp(x, w[0], w[2], dropout_p=0.5))
    identity = torch.eye(10)
    hidden = F.mlp(torch.ones(4000, 10), identity, identity, activation="relu", dropout_p=0.25)
    assert set(hidden.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert hidden.mean() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("sizes", [(0, 10, 6), (6, 0, 6), (6, 10, 0)])
def test_no_columns_have_gradients(sizes, backend):
    x, w = torch.randn(3, sizes[0], requires_grad=True), weights(*sizes)
    grads = torch.autograd.grad(F.glu_mlp(x, *w, backend=backend).sum(), (x, *w))
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (x, *w), strict=True))


def test_only_the_wanted_gradients():
    x, w = torch.randn(3, 6), weights()
    w[1].requires_grad_(False)
    F.glu_mlp(x, *w).sum().backward()
    assert x.grad is None and w[1].grad is None
    assert w[0].grad is not None and w[2].grad is not None


def test_autocast_and_compile():
    x, w = torch.randn(4, 6), weights()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.glu_mlp(x, *w)
    assert y.dtype == torch.bfloat16
    half = [t.bfloat16() for t in (x, *w)]
    assert torch.equal(y, F.glu_mlp(*half))
    expected = reference.glu_mlp(*half)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


W = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x=torch.ones(2, 5)), ValueError, r"gate_weight \(F, d\)"),
        (dict(x=torch.ones(2, 3).int()), TypeError, "x must be float"),
        (dict(up_weight=torch.ones(5, 3)), ValueError, r"up_weight must have shape \(4, 3\)"),
        (dict(up_weight=W.half()), TypeError, "up_weight must have the dtype of x"),
        (dict(down_weight=torch.ones(2, 5)), ValueError, r"down_weight must have shape \(n, 4\)"),
        (dict(gate_bias=torch.ones(3)), ValueError, r"gate_bias must have shape \(4,\)"),
        (dict(down_bias=torch.ones(4)), ValueError, r"down_bias must have shape \(2,\)"),
        (dict(activation="mish"), ValueError, "activation must be one of"),
        (dict(dropout_p=1.0), ValueError, "dropout_p must be a finite number >= 0 and < 1"),
        *(
            ({name: t.to_sparse()}, TypeError, f"{name} must be strided, got {name}.layout=")
            for name, t in (
                ("x", torch.ones(2, 3)),
                ("gate_weight", W),
                ("up_weight", W),
                ("down_weight", torch.ones(2, 4)),
                ("up_bias", torch.ones(4)),
            )
        ),
        (dict(backend="tpu"), ValueError, "backend must be one of"),
    ],
)
def test_bad_input(arguments, error, message):
    valid = dict(x=torch.ones(2, 3), gate_weight=W, up_weight=W, down_weight=torch.ones(2, 4))
    with pytest.raises(error, match=f"glu_mlp: .*{message}"):
        F.glu_mlp(**(valid | arguments))
