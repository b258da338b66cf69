"""Losses beyond what tests/ops/test_specs.py runs for every op: targets, memory, options."""

import pytest
import torch
from losses import random_tensors

from omniattn import reference
from omniattn.functional import cross_entropy, linear_cross_entropy, linear_log_prob


def logits_and_target(rows=5, vocab=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).to(dtype)
    return logits, torch.randint(vocab, (rows,), generator=generator)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_torchs(reduction, label_smoothing, weighted):
    logits, target = logits_and_target(33, 5000)
    target[::4] = -100
    weight = torch.rand(5000, generator=torch.Generator().manual_seed(1)) if weighted else None
    options = {"reduction": reduction, "label_smoothing": label_smoothing}

    def run(function, **kwargs):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, **options, **kwargs)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaf)

    actual = run(cross_entropy, class_weight=weight)
    torch.testing.assert_close(actual, run(torch.nn.functional.cross_entropy, weight=weight))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_cross_entropy_of_probabilities_is_torchs(reduction, label_smoothing, weighted, backend):
    logits, target = random_tensors((2, 9, 70), (2, 9, 70))
    target = 3 * target.detach().softmax(-1)  # sums that are not 1 count too
    weight = torch.rand(70, generator=torch.Generator().manual_seed(1)) if weighted else None
    options = {"reduction": reduction, "label_smoothing": label_smoothing}

    def run(function, *tensors, **kwargs):
        leaves = [t.detach().clone().requires_grad_() for t in (logits, target)]
        loss = function(*leaves, **options, **kwargs)
        return loss, *torch.autograd.grad(loss.square().sum(), leaves)

    def torchs(logits, target, **kwargs):
        logits, target = (t.flatten(0, 1) for t in (logits, target))
        loss = torch.nn.functional.cross_entropy(logits, target, weight=weight, **kwargs)
        return loss.view(2, 9) if reduction == "none" else loss

    actual = run(cross_entropy, class_weight=weight, backend=backend)
    torch.testing.assert_close(actual, run(torchs), rtol=1e-4, atol=1e-4)


def test_options_of_cross_entropy_of_probabilities():
    """Options mean the same for a one-hot target as for the index of the class."""
    logits, target = logits_and_target(dtype=torch.float64)
    class_weight = torch.arange(7.0) / 3
    options = {"z_loss": 0.1, "softcap": 2.0, "temperature": 0.7, "class_weight": class_weight}
    one_hot = torch.nn.functional.one_hot(target, 7).double()

    def run(target):
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, target, reduction="none", **options)
        return loss, *torch.autograd.grad(loss.sum(), leaf)

    torch.testing.assert_close(run(one_hot), run(target))
    uniform = cross_entropy(torch.full((2, 7), 1e30), torch.full((2, 7), 1 / 7))
    torch.testing.assert_close(uniform, torch.tensor(7.0).log())
    masked = logits.masked_fill(one_hot == 0, -torch.inf)
    assert cross_entropy(masked, one_hot) == 0
    with pytest.raises(ValueError, match="ignore_index is for targets that are classes"):
        cross_entropy(logits, one_hot, ignore_index=3)
    with pytest.raises(ValueError, match="target"):
        cross_entropy(logits, one_hot[:, :3])


@pytest.mark.parametrize("value", [-1e9, 1e30, -3e38])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_large_equal_logits_are_uniform(value, label_smoothing):
    """The logarithm of the number of classes is below the rounding of the logits."""
    target = torch.tensor([1, 6])
    logits = torch.full((2, 7), value, requires_grad=True)
    bias = torch.full((7,), value, requires_grad=True)
    expected = torch.zeros(2, 7, requires_grad=True)
    options = {"label_smoothing": label_smoothing}
    losses = (
        cross_entropy(logits, target, **options),
        linear_cross_entropy(torch.ones(2, 3), torch.zeros(7, 3), target, bias=bias, **options),
        torch.nn.functional.cross_entropy(expected, target, **options),
    )
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[2])
    torch.testing.assert_close(logits.grad, expected.grad)
    torch.testing.assert_close(bias.grad, expected.grad.sum(0))


def test_a_loss_of_zero_class_weights_is_zero():
    logits, target = logits_and_target()
    logits.requires_grad_()
    loss = cross_entropy(logits, target, class_weight=torch.zeros(7))
    loss.backward()
    assert loss == 0 and logits.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_softcap_caps_the_logits(dtype):
    """Gemma 2's; rows end within a vector, and a block of columns ends within them."""
    logits, target = logits_and_target(4, 5003, dtype)
    logits = logits.mul(20).requires_grad_()
    logits.data[0, :3] = torch.tensor([torch.inf, -torch.inf, 3e4])
    wide = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(5 * torch.tanh(wide / 5), target)
    actual = cross_entropy(logits, target, softcap=5.0)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    (grad,), (wanted,) = (
        torch.autograd.grad(*pair) for pair in ((actual, logits), (expected, wide))
    )
    tolerance = float(wanted.abs().max()) * (8e-3 if dtype == torch.bfloat16 else 1e-6)
    torch.testing.assert_close(grad.double(), wanted, rtol=0, atol=tolerance)


def test_extreme_logits():
    logits, target = logits_and_target(4, 5000)
    logits[0] = -torch.inf
    logits[0, target[0]] = 3.0
    logits[1] *= 1e18
    logits[2, 4500] = 300.0  # the maximum comes late
    logits[3, 10] = torch.nan
    actual = cross_entropy(logits, target, reduction="none")
    expected = reference.cross_entropy(logits, target, reduction="none")
    assert actual[0] == 0 and actual[3].isnan()
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [7, -1, -101])
def test_a_target_out_of_range_is_named(bad):
    logits, target = logits_and_target()
    target[3] = bad
    x, weight = torch.ones(5, 2), torch.ones(7, 2)
    for call in (
        lambda: cross_entropy(logits, target),
        lambda: linear_cross_entropy(x, weight, target),
    ):
        native, emulated = rf"\[0, 7\).*target={bad} at flat index 3", r"\[0, V\)"
        with pytest.raises(RuntimeError, match=f"target must be in ({native}|{emulated})"):
            call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_other_integers(dtype):
    logits, target = logits_and_target()
    assert cross_entropy(logits, target.to(dtype), ignore_index=99) == cross_entropy(logits, target)


def test_nothing_kept_gives_zero_loss_and_gradients():
    logits, target = logits_and_target()
    logits.requires_grad_()
    loss = cross_entropy(logits, target.fill_(-100))
    loss.backward()
    assert loss == 0 and logits.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("mean", torch.float32), ("none", torch.bfloat16)], ids=str
)
def test_many_chunks_equal_the_reference(reduction, dtype):
    """A vocabulary of 2^22 leaves room for 4 tokens at a time. (The reference in fp64: torch's fp32
    product is off by 5e-3 over so many terms on some machines.)"""
    generator = torch.Generator().manual_seed(0)
    vocab = 2**22
    shapes = ((6, 2), (vocab, 2), (vocab,))
    inputs = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    target = torch.randint(vocab, (6,), generator=generator)

    def run(function, dtype):
        x, weight, bias = (t.to(dtype).requires_grad_() for t in inputs)
        loss = function(x, weight, target, bias=bias, reduction=reduction)
        return loss, *torch.autograd.grad(loss.sum(), (x, weight, bias))

    found = run(linear_cross_entropy, dtype), run(reference.linear_cross_entropy, torch.float64)
    for actual, expected in zip(*found, strict=True):
        scale = float(expected.detach().abs().max())
        tolerance = (1e-4 if dtype == torch.float32 else 2e-2) * scale
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_log_probs_of_targets_are_those_of_log_softmax(backend):
    """With logits that are kept for the backward, and with those that are computed again."""
    x, weight, bias = random_tensors((2, 9, 4), (11, 4), (11,))
    target = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    target[0, :4] = -100
    logits = 3 * torch.tanh(torch.nn.functional.linear(x, weight, bias) / 3) / 0.7
    picked = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = picked.masked_fill(target == -100, 0)
    options = {"bias": bias, "softcap": 3.0, "temperature": 0.7, "backend": backend}
    actual = linear_log_prob(x, weight, target, **options)
    torch.testing.assert_close(actual, expected)
    grads = [
        torch.autograd.grad((loss * loss.detach()).sum(), (x, weight, bias))
        for loss in (actual, expected)
    ]
    torch.testing.assert_close(*grads)


def test_gradients_only_where_wanted():
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    linear_cross_entropy(x, weight, torch.tensor([0, 1, 4])).backward()
    assert x.grad is None and weight.grad is not None


def test_gradients_of_a_batch_and_no_forward_mode():
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.tensor([0, 1, 4])

    def loss(x):
        return linear_cross_entropy(x, weight, target)

    want = torch.autograd.grad(loss(x[0]) + loss(x[1]), (x, weight))
    together = torch.func.vmap(loss)(x).sum()
    torch.testing.assert_close(torch.autograd.grad(together, (x, weight)), want)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy has no forward-mode"):
        torch.func.jvp(loss, (x[0],), (x[1],))


def test_large_results_are_streamed_past_the_caches():
    logits, target = logits_and_target(300, 30000)
    logits.requires_grad_()
    cross_entropy(logits, target).backward()
    expected = logits.detach().softmax(-1)
    expected[torch.arange(300), target] -= 1
    torch.testing.assert_close(logits.grad, expected / 300)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.ones(4).long()}, ValueError, r"target must have shape \(5,\)"),
        ({"target": torch.ones(5)}, TypeError, "target must be integers, got target.dtype="),
        ({"logits": torch.ones(5, 7).int()}, TypeError, "logits must be float64, float32"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
        ({"z_loss": float("nan")}, ValueError, "z_loss=nan"),
        ({"temperature": 0.0}, ValueError, "temperature=0.0"),
        ({"class_weight": torch.ones(6)}, ValueError, r"class_weight must have shape \(7,\)"),
        ({"class_weight": torch.ones(7).int()}, TypeError, "class_weight.dtype=torch.int32"),
        (
            {"class_weight": torch.ones(7, requires_grad=True)},
            ValueError,
            "class_weight gets no gradient; detach it, got class_weight.requires_grad=True",
        ),
        ({"reduction": "median"}, ValueError, "reduction='median'"),
        ({"backend": "cuda"}, ValueError, "backend must match the device"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    logits, target = logits_and_target()
    with pytest.raises(error, match=f"cross_entropy: .*{message}"):
        cross_entropy(**({"logits": logits, "target": target} | change))


def test_gradients_that_nobody_finds_are_refused_under_vmap():
    logits, target = torch.randn(2, 3, 7), torch.randint(7, (3,))

    def loss(weight):
        return torch.func.vmap(lambda x: cross_entropy(x, target, class_weight=weight))(
            logits
        ).sum()

    with pytest.raises(ValueError, match="class_weight gets no gradient"):
        torch.func.grad(loss)(torch.ones(7))
