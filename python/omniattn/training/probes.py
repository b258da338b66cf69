"""Probes: how well fixed features tell classes apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from omniattn.checks.arguments import require_int, require_number


def linear_probe(
    train: Tensor, labels: Tensor, held_out: Tensor, targets: Tensor, *, ridge: float = 1e-2
) -> float:
    """Returns the accuracy on held-out features of a linear classifier fitted to others.

    The classifier is the ridge regression of one-hot labels on standardised features, in float64.

    Args:
        train, labels: features (N, d) and classes (N,) to fit.
        held_out, targets: features (M, d) and classes (M,) to predict.
        ridge: weight of the squared coefficients, for each example.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0], [10.0]]), torch.tensor([0, 0, 1, 1])
        >>> linear_probe(x, y, torch.tensor([[2.0], [8.0]]), torch.tensor([0, 1]))
        1.0
    """
    require_number("linear_probe", "ridge", ridge, above=0)
    _require_features("linear_probe", train, labels, held_out, targets)
    x = train.double()
    deviation, mean = torch.std_mean(x, 0, correction=0)
    deviation = deviation.clamp(min=1e-6)

    def prepared(features: Tensor) -> Tensor:
        scaled = (features.double() - mean) / deviation
        return torch.cat([scaled, scaled.new_ones(len(scaled), 1)], 1)

    x = prepared(train)
    gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, x.T @ one_hot(labels).double())
    found = (prepared(held_out) @ weight).argmax(-1)
    return float((found == targets).double().mean())


def nearest_neighbors(
    train: Tensor,
    labels: Tensor,
    held_out: Tensor,
    targets: Tensor,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Returns the accuracy on held-out features of a vote of the k most similar ones.

    A neighbour's vote weighs exp(cosine / temperature).

    Args:
        train, labels: features (N, d) and classes (N,) that vote.
        held_out, targets: features (M, d) and classes (M,) to predict.
        k: number of neighbours, at most N are used.
        temperature: above 0.

    Reference:
        Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", 2018,
        arXiv 1805.01978.

    Example:
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> nearest_neighbors(x, y, torch.tensor([[3.0, 1.0]]), torch.tensor([0]), k=1)
        1.0
    """
    require_int("nearest_neighbors", "k", k, 1)
    require_number("nearest_neighbors", "temperature", temperature, above=0)
    _require_features("nearest_neighbors", train, labels, held_out, targets)
    scores = normalize(held_out.double(), dim=-1) @ normalize(train.double(), dim=-1).T
    best, index = scores.topk(min(k, len(train)), -1)
    votes = torch.zeros(len(held_out), int(labels.max()) + 1, dtype=best.dtype, device=best.device)
    votes.scatter_add_(1, labels[index], ((best - 1) / temperature).exp())
    return float((votes.argmax(-1) == targets).double().mean())


def _require_features(
    op: str, train: Tensor, labels: Tensor, held_out: Tensor, targets: Tensor
) -> None:
    pairs = (("train", train, "labels", labels), ("held_out", held_out, "targets", targets))
    for name, features, other, classes in pairs:
        if features.dim() != 2 or classes.shape != features.shape[:1] or not len(features):
            raise ValueError(
                f"{op}: {name} must have shape (N, d) and {other} (N,) with N >= 1, got "
                f"{name}.shape={tuple(features.shape)}, {other}.shape={tuple(classes.shape)}"
            )
