"""jsd and linear_jsd beyond what tests/ops/test_specs.py runs for every op."""

import pytest
import torch
from losses import random_tensors

from omniattn import reference
from omniattn.functional import jsd, linear_jsd


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_divergences_of_probabilities(beta):
    """The definition, from probabilities."""
    student, teacher = (t.double() for t in random_tensors((5, 70), (5, 70)))
    q, p = (student / 2).softmax(-1), (teacher.detach() / 2).softmax(-1)
    mixture = beta * p + (1 - beta) * q
    kl_teacher, kl_student = ((a * (a / mixture).log()).sum(-1) for a in (p, q))
    expected = beta * kl_teacher + (1 - beta) * kl_student
    if beta in (0, 1):
        expected = ((p * (p / q).log()) if beta == 0 else (q * (q / p).log())).sum(-1)
    actual = jsd(student, teacher.detach(), beta=beta, temperature=2.0, reduction="none")
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(loss.mean(), student)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_log_probs_are_those_of_torchs_kl_div(beta):
    log_q, log_p = (t.detach().log_softmax(-1) for t in random_tensors((5, 70), (5, 70)))
    log_q.requires_grad_()
    pair = (log_q, log_p) if beta == 0 else (log_p, log_q)
    expected = torch.nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
    actual = jsd(log_q, log_p, beta=beta, log_probs=True)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(loss, log_q)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences_of_extreme_logits(beta):
    """Classes that both exclude count for nothing, NaN stays, huge equal logits are uniform."""
    student, teacher = (t.detach() for t in random_tensors((4, 70), (4, 70)))
    student[0, 1::2] = teacher[0, 1::2] = -torch.inf
    student[1], teacher[1] = 1e30, -1e30
    student[2, 3] = torch.nan
    student[3, :2] = torch.tensor([3e4, -3e4])
    student.requires_grad_()
    losses = jsd(student, teacher, beta=beta, reduction="none")
    few = jsd(student[:1, ::2], teacher[:1, ::2], beta=beta, reduction="none")
    torch.testing.assert_close(losses[:1], few)
    assert losses[1].abs() < 1e-6 and losses[2].isnan() and losses[3].isfinite()
    (grad,) = torch.autograd.grad(losses[[0, 1, 3]].sum(), student)
    assert grad[[0, 1, 3]].isfinite().all() and grad[0, 1::2].count_nonzero() == 0


@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize("model", ["student", "teacher"])
@pytest.mark.parametrize(("beta", "other"), [(0, 0), (0.3, 0), (0.3, -torch.inf), (1, 0)])
def test_nan_of_one_class_reaches_the_divergence(beta, other, model, log_probs):
    """Between 0 and 1 also where the other model excludes the class."""
    inputs = {n: torch.zeros(1, 19) for n in ("student", "teacher")}
    for name, logits in inputs.items():
        logits[0, 17] = torch.nan if name == model else other
    assert jsd(**inputs, beta=beta, log_probs=log_probs).isnan()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_small_divergences_keep_their_digits(beta):
    """Losses of 1e-7 are the rest of terms of 1e-4 for each class."""
    student, change = (t.detach().double() for t in random_tensors((20, 1000), (20, 1000)))
    student, teacher = student.float(), (student + 1e-3 * change).float()
    found = jsd(student, teacher, beta=beta, reduction="none").double()
    wanted = reference.jsd(student.double(), teacher.double(), beta=beta, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_chunks_of_divergences_equal_the_reference(reduction):
    """A vocabulary of 2^22 leaves room for 2 tokens at a time."""
    vocab = 2**22
    student = random_tensors((5, 2), (vocab, 2))
    teacher = [t.detach() for t in random_tensors((5, 3), (vocab, 3))]

    def run(function, dtype):
        x, weight = (t.detach().to(dtype).requires_grad_() for t in student)
        loss = function(x, weight, *(t.to(dtype) for t in teacher), beta=0.0, reduction=reduction)
        return loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight))

    found = run(linear_jsd, torch.float32), run(reference.linear_jsd, torch.float64)
    for actual, expected in zip(*found, strict=True):
        tolerance = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"teacher": torch.ones(5, 6)}, ValueError, r"teacher must have shape \(5, 7\)"),
        ({"teacher": torch.ones(5, 7).half()}, TypeError, "teacher must have the dtype of student"),
        ({"teacher": torch.ones(5, 7, requires_grad=True)}, ValueError, "teacher gets no gradient"),
        ({"beta": 1.5}, ValueError, "beta=1.5"),
        ({"temperature": -1.0}, ValueError, "temperature=-1.0"),
        (
            {"log_probs": True, "temperature": 2.0},
            ValueError,
            "temperature must be 1 with log_probs",
        ),
        ({"target": torch.ones(4).long()}, ValueError, r"target must have shape \(5,\)"),
        ({"reduction": "batchmean"}, ValueError, "reduction='batchmean'"),
    ],
)
def test_errors_of_divergences_name_the_argument(change, error, message):
    inputs = {"student": torch.ones(5, 7), "teacher": torch.ones(5, 7)}
    with pytest.raises(error, match=f"jsd: .*{message}"):
        jsd(**(inputs | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"teacher_weight": torch.ones(6, 3)},
            ValueError,
            r"teacher_weight must have shape \(7, 3",
        ),
        ({"teacher_x": torch.ones(4, 3)}, ValueError, r"teacher_x must have shape \(5, 3\)"),
        ({"teacher_x": torch.ones(5, 2)}, ValueError, r"teacher_weight \(V, K\)"),
        ({"teacher_bias": torch.ones(6)}, ValueError, r"teacher_bias must have shape \(7,\)"),
        (
            {"teacher_weight": torch.ones(7, 3, requires_grad=True)},
            ValueError,
            "teacher_weight.requires_grad=True",
        ),
    ],
)
def test_errors_of_linear_divergences_name_the_argument(change, error, message):
    inputs = {
        "x": torch.ones(5, 2),
        "weight": torch.ones(7, 2),
        "teacher_x": torch.ones(5, 3),
        "teacher_weight": torch.ones(7, 3),
    }
    with pytest.raises(error, match=f"linear_jsd: .*{message}"):
        linear_jsd(**(inputs | change))
