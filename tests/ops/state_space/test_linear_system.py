"""ssm_recurrence and ssm_kernel: step by step, as a convolution, from HiPPO, errors."""

import pytest
import torch
from recurrence_cases import draw

from omniattn import functional as F

N, INPUTS, OUTPUTS = 5, 3, 2


def system():
    return 0.4 * draw(N, N), draw(N, INPUTS, seed=1), draw(OUTPUTS, N, seed=2)


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("delayed", [False, True])
def test_recurrence(steps, delayed):
    A, B, C = system()
    D, u, s = draw(OUTPUTS, INPUTS, seed=3), draw(2, steps, INPUTS, seed=4), draw(2, N, seed=5)
    y, final = F.ssm_recurrence(u, A, B, C, D, initial_state=s, delayed=delayed)
    expected = []
    for x in u.unbind(1):
        before, s = s, s @ A.T + x @ B.T
        expected.append((before if delayed else s) @ C.T + x @ D.T)
    torch.testing.assert_close(final, s)
    assert y.shape == (2, steps, OUTPUTS)
    if steps:
        torch.testing.assert_close(y, torch.stack(expected, 1))


@pytest.mark.parametrize("delayed", [False, True])
def test_kernel(delayed):
    A, B, C = system()
    u = draw(2, 19, INPUTS, seed=4)
    kernel = F.ssm_kernel(A, B, C, 19)
    torch.testing.assert_close(kernel[4], C @ torch.linalg.matrix_power(A, 4) @ B)
    y, _ = F.ssm_recurrence(u, A, B, C, delayed=delayed)
    for t in range(19):
        past = u[:, : t + (not delayed)].flip(1)
        expected = torch.einsum("loi,bli->bo", kernel[: past.shape[1]], past)
        torch.testing.assert_close(y[:, t], expected)
    D = draw(OUTPUTS, INPUTS, seed=3)
    for taps in (kernel, F.ssm_kernel(A, B, C, 30)):
        by_fft = F.fft_conv(u, taps, D, delayed=delayed)
        torch.testing.assert_close(by_fft, y + u @ D.mT)
    leaves = [t.requires_grad_() for t in (u[:1, :4].clone(), kernel[:3].clone(), D)]
    assert torch.autograd.gradcheck(lambda *t: F.fft_conv(*t, delayed=delayed), leaves)
    assert F.fft_conv(u[:, :0], kernel).shape == (2, 0, OUTPUTS)
    assert not F.fft_conv(u, kernel[:0]).any()
    assert F.ssm_kernel(A, B, C, 0).shape == (0, OUTPUTS, INPUTS)


def test_of_hippo_by_s4s_bilinear_rule():
    """The dense system that S4 computes by its generating function, with gradients."""
    A, B = F.hippo_legs(6, dtype=torch.float64)
    Ab, Bb = F.discretize(A, B, torch.tensor(0.05, dtype=torch.float64), rule="bilinear")
    Bb = Bb.reshape(6, -1)
    C, u = draw(1, 6).requires_grad_(), draw(1, 9, 1, seed=2).requires_grad_()

    def run(u, C):
        return F.ssm_recurrence(u, Ab, Bb, C)

    assert torch.autograd.gradcheck(run, (u, C))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"u": draw(2, 4)}, ValueError, r"u must have shape \(batch, T, inputs\), got u.shape="),
        ({"A": draw(N, 4)}, ValueError, r"A must have shape \(N, N\), got A.shape=\(5, 4\)"),
        ({"B": draw(4, INPUTS)}, ValueError, r"B must have shape \(5, inputs\), got B.shape=\(4"),
        (
            {"B": draw(N, 1)},
            ValueError,
            r"B must have shape \(N, inputs\) with the inputs of u, go",
        ),
        ({"C": draw(2, 4)}, ValueError, r"C must have shape \(outputs, 5\), got C.shape=\(2, 4\)"),
        ({"D": draw(2, 2)}, ValueError, r"D must have shape \(2, 3\), got D.shape=\(2, 2\)"),
        ({"A": torch.ones(5, 5).int()}, TypeError, r"A must be floating-point, got A.dtype=torch"),
        ({"initial_state": draw(2, 4)}, ValueError, r"initial_state must have shape \(2, 5\), got"),
        ({"delayed": 1}, TypeError, r"delayed must be True or False, got delayed=1"),
    ],
)
def test_errors(changed, error, message):
    A, B, C = system()
    with pytest.raises(error, match=f"ssm_recurrence: {message}"):
        F.ssm_recurrence(**({"u": draw(2, 4, INPUTS), "A": A, "B": B, "C": C} | changed))


@pytest.mark.parametrize("name", ["A", "B", "C", "D", "initial_state"])
def test_devices_and_dtypes_are_named(name):
    A, B, C = system()
    given = {"A": A, "B": B, "C": C, "D": draw(OUTPUTS, INPUTS), "initial_state": draw(2, N)}
    u = draw(2, 4, INPUTS)
    with pytest.raises(ValueError, match=f"{name} must be on the device of u, got {name}.device="):
        F.ssm_recurrence(u, **(given | {name: given[name].to("meta")}))
    for wrong in (torch.complex128, torch.int64):
        with pytest.raises(TypeError, match=f"{name} must be floating-point, got {name}.dtype"):
            F.ssm_recurrence(u, **(given | {name: given[name].to(wrong)}))


def test_kernel_is_of_one_dtype_and_device():
    A, B, C = system()
    with pytest.raises(TypeError, match=r"float64 or float32, all the same, got A.*, B.dtype="):
        F.ssm_kernel(A, B.float(), C, 3)
    with pytest.raises(TypeError, match=r"float64 or float32, .*got A.dtype=torch.bfloat16"):
        F.ssm_kernel(A.bfloat16(), B, C, 3)
    with pytest.raises(ValueError, match=r"C must be on the device of A, got C.device=meta"):
        F.ssm_kernel(A, B, C.to("meta"), 3)


def test_autocast_rounds_no_power():
    A, one = torch.tensor([[0.999]]), torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel = F.ssm_kernel(A, one, one, 1000)
        y, _ = F.ssm_recurrence(torch.ones(1, 1000, 1), A, one, one)
        mixed = F.fft_conv(torch.ones(1, 1, 1), 0 * kernel[:1], A)
    torch.testing.assert_close(kernel[-1], A**999, rtol=1e-4, atol=0)
    torch.testing.assert_close(y[0, -1, 0], kernel.sum(), rtol=1e-4, atol=0)
    assert mixed.item() == A.item()
