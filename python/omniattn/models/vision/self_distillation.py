"""Parts of DINO's loss: targets of the teacher, centred or balanced, and the spread of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from omniattn.checks.arguments import require_float, require_int, require_number
from omniattn.modules.base.layer import Float32Buffers
from omniattn.reference.precision import widen


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, *, iterations: int = 3) -> Tensor:
    """Returns probabilities (N, K) of prototypes that are used evenly over the rows.

    The matrix exp(logits / temperature) is scaled alternately so that its columns and its rows have
    equal sums (Sinkhorn and Knopp); the rows of the result have the sum 1.

    Args:
        logits: (N, K).
        temperature: above 0.
        iterations: number of times that both are scaled.

    Reference:
        Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster
        Assignments", 2020, arXiv 2006.09882.

    Example:
        >>> sinkhorn(torch.tensor([[3.0, 2.0], [3.0, 1.0]]), 1.0, iterations=50)
        tensor([[0.3775, 0.6225],
                [0.6225, 0.3775]])
    """
    op = "sinkhorn"
    require_float(op, "logits", logits)
    require_number(op, "temperature", temperature, above=0)
    require_int(op, "iterations", iterations, 1)
    scores = widen(logits) / temperature
    for _ in range(iterations):  # in logarithms, which do not overflow
        scores = scores - scores.logsumexp(0, keepdim=True)
        scores = scores - scores.logsumexp(1, keepdim=True)
    return scores.exp()


def koleo_loss(features: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Computes -mean ln d, where d is each row's distance to its nearest other row, on the sphere.

    Args:
        features: (N, d) with N of at least 2, normed here to length 1.
        eps: added to the distances.

    Reference:
        Sablayrolles et al., "Spreading vectors for similarity search", 2018, arXiv 1806.03198.

    Example:
        >>> koleo_loss(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor(-0.3466)
    """
    require_float("koleo_loss", "features", features)
    if features.dim() != 2 or features.shape[0] < 2:
        raise ValueError(
            "koleo_loss: features must have shape (N, d) with N >= 2, "
            f"got features.shape={tuple(features.shape)}"
        )
    x = normalize(widen(features), dim=-1)
    with torch.no_grad():
        scores = x @ x.T
        nearest = scores.fill_diagonal_(-2.0).argmax(-1)
    distance = torch.linalg.vector_norm(x - x[nearest], dim=-1)
    return -(distance + eps).log().mean()


class Targets(Float32Buffers):
    """Maps the teacher's logits to targets, and follows their mean.

    Args:
        prototypes: number of logits.
        centering: "mean" subtracts a running mean of the logits; "sinkhorn" balances a batch.
        momentum: of the running mean.
        device: of the buffers.
    """

    center: Tensor
    progress: Tensor

    def __init__(
        self,
        prototypes: int,
        centering: str,
        momentum: float,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.centering, self.momentum = centering, momentum
        self.register_buffer("center", torch.zeros(prototypes, device=device))
        # Finished share of the training.
        self.register_buffer("progress", torch.zeros((), device=device))

    def reset_parameters(self) -> None:
        """Sets the running mean and the finished share of the training to 0."""
        self.center.zero_()
        self.progress.zero_()

    @torch.no_grad()
    def forward(self, logits: Tensor, temperature: float) -> Tensor:
        """Returns the probabilities of logits (..., K), without a gradient."""
        if self.centering == "sinkhorn":
            rows = sinkhorn(logits.flatten(0, -2), temperature)
            return rows.view(logits.shape)
        return ((widen(logits) - self.center) / temperature).softmax(-1)

    @torch.no_grad()
    def update(self, logits: Tensor) -> None:
        """Moves the running mean towards that of the logits (N, K)."""
        if self.centering == "mean" and len(logits):
            self.center.lerp_(widen(logits).mean(0).to(self.center.dtype), 1 - self.momentum)
