"""Losses of distillation, and of self-supervised training."""

from __future__ import annotations

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_number


def distillation_loss(
    class_logits: Tensor,
    distillation_logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "hard",
    soft_share: float = 0.1,
    temperature: float = 3.0,
    divide_by_classes: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Computes the loss of DeiT, in which one head learns from labels and one from a teacher.

    "hard" is ``(CE(class, y) + CE(distillation, argmax teacher)) / 2``. "soft" is ``(1 - a)
    CE(class, y) + a t^2 KL(teacher / t || distillation / t)``, summed over the classes and averaged
    over the batch.

    Args:
        class_logits, distillation_logits: (B, classes), of the class and of the distillation token.
        labels: (B,) int.
        teacher_logits: (B, classes), used without a gradient.
        kind: "hard" or "soft".
        soft_share, temperature: a and t.
        divide_by_classes: True to divide the soft loss by the number of classes too, as the release
            of DeiT does.
        backend: backend of the cross-entropy.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: an unknown kind, a share outside [0, 1] or a temperature that is not positive.

    Reference:
        Touvron et al., "Training data-efficient image transformers & distillation through
        attention", 2020, arXiv 2012.12877; Hinton, Vinyals, Dean, "Distilling the Knowledge in a
        Neural Network", 2015, arXiv 1503.02531.

    Example:
        >>> logits, labels = torch.zeros(2, 4), torch.tensor([0, 3])
        >>> distillation_loss(logits, logits, labels, logits)
        tensor(1.3863)
    """
    op = "distillation_loss"
    require_choice(op, "kind", kind, ("hard", "soft"))
    require_number(op, "soft_share", soft_share, 0, 1)
    require_number(op, "temperature", temperature, above=0)
    teacher_logits = teacher_logits.detach()
    base = functional.cross_entropy(class_logits, labels, backend=backend)
    if kind == "hard":
        wanted = teacher_logits.argmax(-1)
        return (base + functional.cross_entropy(distillation_logits, wanted, backend=backend)) / 2
    soft = temperature**2 * functional.jsd(
        distillation_logits,
        teacher_logits.to(distillation_logits.dtype),
        beta=0.0,
        temperature=temperature,
        backend=backend,
    )
    if divide_by_classes:
        soft = soft / distillation_logits.shape[-1]
    return (1 - soft_share) * base + soft_share * soft
