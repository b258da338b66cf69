"""Divergences of logits, and fused with linear layers, without storing all logits."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    FLOATS,
    autocast_dtype,
    autocast_linear,
    implementation,
    require_bool,
    require_float,
    require_like,
    require_shape,
    shown,
)
from omniattn.checks.jagged import token_wise
from omniattn.encoding.losses import Divergence, DivergenceOptions
from omniattn.encoding.records import packed, spelled_out
from omniattn.functional.losses._common import (
    check_divergence,
    check_linear,
    check_target,
    refuse_gradient,
    wanted_gradients,
)
from omniattn.ops import loss as ops

__all__ = ["jsd", "linear_jsd"]


@token_wise("teacher", numbers=("target",))
@spelled_out(DivergenceOptions, Divergence, last=("log_probs", "reduction", "backend"))
def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    log_probs: bool = False,
    reduction: str = "mean",
    backend: str | None = None,
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student's from a teacher's distribution.

    ``beta KL(P || M) + (1 - beta) KL(Q || M)`` with ``M = beta P + (1 - beta) Q``,
    ``Q = softmax(student / temperature)`` and ``P = softmax(teacher / temperature)``; the forward
    ``KL(P || Q) = sum_v P_v (ln P_v - ln Q_v)`` at beta = 0, the reverse ``KL(Q || P)`` at 1.

    Args:
        student: (..., V) logits, float64, float32, bfloat16 or float16, any strides; or nested,
            with a teacher and a target of its boundaries.
        teacher: (..., V) of the student's dtype, or under autocast of any, and then both have the
            wider one. It gets no gradient.
        target: (...) of any integer dtype, compared only with `ignore_index`, or None.
        beta: in [0, 1].
        temperature: above 0; the loss is not multiplied by its square.
        ignore_index: rows with this target give 0 and are not counted by the mean.
        log_probs: student and teacher are ln Q and ln P, as in `torch.nn.functional.kl_div` and
            Liger; the gradient is with respect to ln Q.
        reduction: "mean" over the kept rows, "sum" over them, or "none".
        backend: see :func:`omniattn.functional.cross_entropy`.

    Returns:
        float32 (float64 for float64): a scalar, or (...) without reduction.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a shape, device or option is invalid; a teacher that needs a gradient.
        NotImplementedError: no native kernel for the device; a second derivative.

    Note:
        Classes with probability 0 contribute 0. The backward saves five numbers per row.

    Reference:
        Agarwal et al., On-Policy Distillation of Language Models, 2023, arXiv:2306.13649.

    Example:
        >>> jsd(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]]), beta=0)
        tensor(0.6931)
    """
    op = "jsd"
    record = packed(op, Divergence, options)
    require_float(op, "student", student)
    if student.dim() == 0:
        raise ValueError(f"{op}: student must have at least 1 dimension, got student.shape=()")
    student, teacher = _promoted(student, teacher)
    require_like(op, "teacher", teacher, student, "student")
    require_shape(op, "teacher", teacher, student.shape)
    refuse_gradient(op, "teacher", teacher)
    target = None if target is None else check_target(op, target, student)
    require_bool(op, "log_probs", log_probs)
    number = check_divergence(op, record, reduction)
    beta, temperature, ignore_index = record
    if log_probs and temperature != 1:
        raise ValueError(
            f"{op}: temperature must be 1 with log_probs, got temperature={shown(temperature)}"
        )
    run = implementation(op, backend, student, ops.jsd)
    loss: Tensor = run(student, teacher, target, ignore_index, beta, temperature, log_probs, number)
    return loss


def _promoted(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Promotes both to the wider dtype under autocast, as autocast does for torch's losses."""
    fits = isinstance(teacher, Tensor) and teacher.dtype in FLOATS
    if not fits or teacher.dtype == student.dtype or autocast_dtype(student) is None:
        return student, teacher
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    return student.to(dtype), teacher.to(dtype)


@token_wise("teacher_x", numbers=("target",))
@spelled_out(DivergenceOptions, Divergence, last=("reduction", "backend"))
def linear_jsd(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: str = "mean",
    backend: str | None = None,
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """:func:`jsd` of ``x weight^T + bias`` and a teacher's logits, computed in chunks of tokens.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16; or nested. Under autocast all floating
            tensors are cast to its dtype.
        weight: (V, K) of x's dtype.
        teacher_x: (..., K') of x's dtype, the teacher's hidden states.
        teacher_weight: (V, K') of x's dtype. The teacher gets no gradient.
        target: (...) of any integer dtype, compared only with `ignore_index`, or None.
        bias, teacher_bias: (V,) of x's dtype, or None.
        beta, temperature, ignore_index, reduction, backend: see :func:`jsd`.

    Returns:
        float32 (float64 for float64): a scalar, or (...) without reduction.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`jsd`.

    Note:
        Memory and products as in :func:`omniattn.functional.linear_cross_entropy`, and one product
        for the teacher's logits.

    Reference:
        Agarwal et al., On-Policy Distillation of Language Models, 2023, arXiv:2306.13649.

    Example:
        >>> x, head = torch.ones(1, 2), torch.eye(2)
        >>> linear_jsd(x, head, x, torch.zeros(2, 2))
        tensor(0.)
    """
    op = "linear_jsd"
    record = packed(op, Divergence, options)
    x, weight, bias = autocast_linear(x, weight, bias)
    teacher_x, teacher_weight, teacher_bias = autocast_linear(
        teacher_x, teacher_weight, teacher_bias
    )
    check_linear(op, x, weight, bias)
    teacher = {"teacher_x": teacher_x, "teacher_weight": teacher_weight}
    if teacher_bias is not None:
        teacher["teacher_bias"] = teacher_bias
    for name, t in teacher.items():
        require_like(op, name, t, x)
        refuse_gradient(op, name, t)
    check_linear(op, teacher_x, teacher_weight, teacher_bias, "teacher_")
    require_shape(op, "teacher_x", teacher_x, (*x.shape[:-1], *teacher_x.shape[-1:]))
    require_shape(op, "teacher_weight", teacher_weight, (weight.shape[0], teacher_weight.shape[1]))
    target = None if target is None else check_target(op, target, x)
    number = check_divergence(op, record, reduction)
    numbers = (record.ignore_index, record.beta, record.temperature, number)
    tensors = (x, weight, bias, teacher_x, teacher_weight, teacher_bias, target)
    run = implementation(op, backend, x, ops.linear_jsd)
    loss: Tensor = run(*tensors, *numbers, *wanted_gradients(reduction, x, weight, bias))
    return loss
