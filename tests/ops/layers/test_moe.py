"""moe_experts beyond what tests/ops/test_specs.py runs for every op."""

import pytest
import torch

import omniattn.functional as F
from omniattn import testing


def inputs(
    tokens=40, experts=3, slots=2, dim=24, features=40, dtype=torch.float32, gate=True, seed=0
):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    return {
        "x": normal(tokens, dim),
        "index": torch.randint(experts, (tokens, slots), generator=random),
        "weights": normal(tokens, slots).softmax(-1),
        "up": normal(experts, (1 + gate) * features, dim) * dim**-0.5,
        "down": normal(experts, dim, features) * features**-0.5,
    }


def results(arguments, **options):
    """Output and gradients of a fixed function of it."""
    names = [n for n, t in arguments.items() if t.is_floating_point()]
    leaves = {n: arguments[n].detach().requires_grad_() for n in names}
    y = F.moe_experts(**(arguments | leaves), **options)
    return (y, *torch.autograd.grad(y.square().sum(), list(leaves.values())))


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_clamps_have_no_gradient_beyond_the_limit():
    arguments = inputs(dtype=torch.float64)
    options = {"activation": "clamped_swiglu", "alpha": 1.3, "limit": 0.4}
    for interleaved in (False, True):
        ours = results(arguments, interleaved=interleaved, **options)
        eager = results(arguments, interleaved=interleaved, backend="reference", **options)
        for a, e in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, e)
    at_limit = {"x": torch.tensor([[0.4]]), "up": torch.ones(1, 2, 1), "down": torch.ones(1, 1, 1)}
    at_limit |= {"index": torch.zeros(1, 1, dtype=torch.int64), "weights": torch.ones(1, 1)}
    ours, eager = (results(at_limit, backend=b, **options) for b in (None, "reference"))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_memory_and_nothing_else(dtype):
    arguments = inputs(300, dtype=dtype)
    assert_same(results(arguments), results(arguments, recompute=True))
    shapes = []
    arguments["x"].requires_grad_()
    for recompute, rows in ((False, 600), (True, 0)):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(t.shape) or t, lambda t: t
        ):
            F.moe_experts(**arguments, recompute=recompute)
        assert (rows, 80) in shapes
        shapes.clear()


def test_transposed_weights_are_neither_copied_nor_are_their_gradients():
    arguments = inputs()
    stored = {n: arguments[n].mT.contiguous().requires_grad_() for n in ("up", "down")}
    views = {n: t.mT for n, t in stored.items()}
    y = F.moe_experts(**(arguments | views))
    y.square().sum().backward()
    expected = results(arguments)
    torch.testing.assert_close(y, expected[0])
    for name, grad in zip(("up", "down"), expected[3:], strict=True):
        assert stored[name].grad.is_contiguous()
        torch.testing.assert_close(stored[name].grad.mT, grad)


def test_intermediate_arrays_are_made_a_few_experts_at_a_time():
    # 20000 rows of 16 + 2048 numbers are more than one wave, and so are those of expert 1.
    arguments = inputs(10000, 3, 2, 16, 2048)
    arguments["index"][1000:] = 1
    y, dx, dweights, dup, ddown = results(arguments)
    halves = [
        results(arguments | {n: arguments[n][rows] for n in ("x", "index", "weights")})
        for rows in (slice(5000), slice(5000, None))
    ]
    for i, whole in enumerate((y, dx, dweights)):
        torch.testing.assert_close(whole, torch.cat([half[i] for half in halves]))
    for i, whole in ((3, dup), (4, ddown)):
        torch.testing.assert_close(whole, halves[0][i] + halves[1][i], rtol=1e-4, atol=1e-3)


def test_results_do_not_depend_on_threads_for_many_experts():
    for tokens, experts in ((8, 4), (700, 9)):
        arguments = inputs(tokens, experts, 3, 72, 300)
        with testing.threads(1):
            expected = results(arguments)
        for count in (2, 3):
            with testing.threads(count):
                assert_same(results(arguments), expected)


def test_slots_without_an_expert_add_nothing():
    arguments = inputs(50)
    dropped = torch.rand(50, 2) < 0.5
    masked = arguments | {"index": arguments["index"].masked_fill(dropped, -1)}
    zeroed = arguments | {"weights": arguments["weights"].masked_fill(dropped, 0)}
    nan = masked | {"weights": arguments["weights"].masked_fill(dropped, float("nan"))}
    a, b, c = (results(each) for each in (masked, zeroed, nan))
    for i in (0, 1, 3, 4):  # output, gradients of x, up, down
        torch.testing.assert_close(a[i], b[i])
    assert_same(a, c)
    assert not a[2][dropped].any()
    none = F.moe_experts(**(arguments | {"index": torch.full_like(arguments["index"], -1)}))
    assert not none.any()


def test_an_expert_chosen_twice_counts_twice():
    arguments = inputs(20)
    twice = arguments | {"index": arguments["index"][:, :1].expand(-1, 2)}
    once = arguments | {
        "index": arguments["index"][:, :1],
        "weights": arguments["weights"].sum(1, keepdim=True),
    }
    torch.testing.assert_close(F.moe_experts(**twice), F.moe_experts(**once))


def test_leading_sizes_and_int32():
    arguments = inputs(24)
    shaped = {n: arguments[n].view(2, 3, 4, -1) for n in ("x", "weights", "index")}
    shaped["index"] = shaped["index"].int()
    y = F.moe_experts(**(arguments | shaped))
    assert y.shape == (2, 3, 4, 24)
    assert torch.equal(y.view(24, 24), F.moe_experts(**arguments))


def test_autocast_casts_the_experts():
    arguments = inputs()
    low = {n: arguments[n].bfloat16() for n in ("x", "up", "down")}
    with torch.autocast("cpu", torch.bfloat16):
        y = F.moe_experts(**arguments)
    assert torch.equal(y, F.moe_experts(**(arguments | low)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index": torch.full((40, 2), 3)}, RuntimeError, r"index must be in \[0, 3\)"),
        ({"index": torch.full((40, 2), -2)}, RuntimeError, r"or -1 for none, got index=-2"),
        ({"index": torch.zeros(40, 2)}, TypeError, "index must be an int64 or int32 tensor"),
        ({"index": torch.zeros(39, 2).long()}, ValueError, "index must have shape"),
        ({"weights": torch.ones(40, 3)}, ValueError, r"weights must have shape \(40, 2\)"),
        ({"weights": torch.ones(40, 2).long()}, TypeError, "weights must be float64"),
        ({"up": torch.ones(3, 24, 80)}, ValueError, r"up \(E, 2F, d\) for swiglu"),
        ({"activation": "relu"}, ValueError, r"up \(E, F, d\) for relu"),
        ({"activation": "tanh"}, ValueError, 'activation must be one of "swiglu"'),
        ({"down": torch.ones(2, 24, 40)}, ValueError, r"down \(E, d, F\)"),
        ({"down": torch.ones(3, 24, 40).half()}, TypeError, "down must have the dtype of x"),
        ({"up_bias": torch.ones(3, 40)}, ValueError, r"up_bias must have shape \(3, 80\)"),
        ({"limit": 0.0}, ValueError, "limit must be a finite number > 0"),
        ({"backend": "cuda"}, ValueError, "backend must match the device"),
        ({"interleaved": "no"}, TypeError, "interleaved must be True or False"),
        (
            {"index": torch.full((40, 2), 3), "backend": "reference"},
            RuntimeError,
            r"index must be in \[0, 3\)",
        ),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=f"moe.*: .*{message}"):
        F.moe_experts(**(inputs() | change))
