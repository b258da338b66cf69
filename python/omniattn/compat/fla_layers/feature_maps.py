"""Feature maps of `fla.modules.feature_map`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_int
from omniattn.compat._fla.norms import layer_norm
from omniattn.compat.fla_layers.base import ACT2FN


def flatten_diag_outer_product(x: Tensor, y: Tensor) -> Tensor:
    """Returns the products x_i y_j with i <= j of the last dimension."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., i] * y[..., j]


def flatten_diag_outer_product_off1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the products x_i y_j with i < j of the last dimension, and those with i = j."""
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    return x[..., i] * y[..., j], x * y


def is_power_of_2(n: int) -> bool:
    """Returns True for 1, 2, 4, 8 and so on."""
    return n > 0 and n & (n - 1) == 0


class HedgehogFeatureMap(nn.Module):
    """Softmax of a linear map and of its negative (Zhang et al. 2024, arXiv:2402.04347)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], -1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """ReLU of a linear map (Kasai et al. 2021, arXiv:2103.13076)."""

    def __init__(
        self, head_dim: int, dot_dim: int | None = None, bias: bool | None = False
    ) -> None:
        super().__init__()
        self.head_dim, self.dot_dim, self.bias = head_dim, dot_dim or head_dim, bias
        self.layer = nn.Linear(head_dim, self.dot_dim, bias=bool(bias))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).relu()
        return y


class DPFPFeatureMap(nn.Module):
    """Products of a vector with its rotations (Schlag et al. 2021, arXiv:2102.11174)."""

    def __init__(self, head_dim: int, nu: int = 4) -> None:
        super().__init__()
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x.relu(), -x.relu()], -1)
        rolled = torch.cat([both.roll(n, -1) for n in range(1, self.nu + 1)], -1)
        return torch.cat([both] * self.nu, -1) * rolled


class HadamardFeatureMap(nn.Module):
    """Product of two linear maps."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer1(x) * self.layer2(x)
        return y


class LearnableOuterProductFeatureMap(nn.Module):
    """Products, see :func:`flatten_diag_outer_product`, of two linear maps."""

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, feature_dim, bias=False)
        self.layer2 = nn.Linear(head_dim, feature_dim, bias=False)
        self.normalizer = feature_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return flatten_diag_outer_product(self.layer1(x), self.layer2(x))


class LearnablePolySketchNonNegativeFeatureMap(nn.Module):
    """Learned sketch of a polynomial kernel (Kacham et al. 2023, arXiv:2310.01655).

    Args:
        head_dim: width of a head.
        sketch_size: width of the sketch, or None for head_dim.
        degree: degree of the polynomial, a power of 2 from 2 on.
    """

    def __init__(
        self, head_dim: int, sketch_size: int | None = None, degree: int | None = 2
    ) -> None:
        super().__init__()
        if degree is None or degree < 2 or not is_power_of_2(degree):
            raise ValueError(
                "LearnablePolySketchNonNegativeFeatureMap: degree must be a power of 2 from 2 on, "
                f"got {degree=}"
            )
        size = head_dim if sketch_size is None else sketch_size
        self.head_dim, self.sketch_size, self.degree = head_dim, size, degree
        self.gamma = nn.Parameter(torch.ones(head_dim))
        self.beta = nn.Parameter(torch.zeros(head_dim))
        widths = [head_dim] + [size] * max(0, degree.bit_length() - 3)
        self.sketches1, self.sketches2 = (
            nn.ModuleList(nn.Linear(width, size, bias=False) for width in widths) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = nnf.layer_norm(x, (self.head_dim,), self.gamma, self.beta)
        for first, second in zip(self.sketches1, self.sketches2, strict=True):
            x = first(x) * second(x) * self.head_dim**-0.5
        return flatten_diag_outer_product(x, x)


class TaylorFeatureMap(nn.Module):
    """Features whose kernel is ``1 + u + u^2 / 2`` with ``u = q . k / sqrt(head_dim)`` (Based)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        root = self.head_dim**0.5
        parts = torch.ones_like(x[..., :1]), x / root**0.5, squares / (root * 2**0.5), mixed / root
        return torch.cat(parts, -1)


class RebasedFeatureMap(nn.Module):
    """Features whose kernel is ``(q . k)^2 / head_dim`` of normed q and k (ReBased).

    Args:
        head_dim: width of a head.
        use_gamma, use_beta: learned factors and offsets.
        normalize: True for a LayerNorm before them.
    """

    def __init__(
        self,
        head_dim: int,
        use_gamma: bool | None = True,
        use_beta: bool | None = True,
        normalize: bool | None = True,
    ) -> None:
        super().__init__()
        require_int("RebasedFeatureMap", "head_dim", head_dim, 1)
        if not (use_gamma or normalize):
            raise ValueError(
                "RebasedFeatureMap: use_gamma or normalize must be True, got "
                f"{use_gamma=}, {normalize=}"
            )
        self.head_dim, self.normalize = head_dim, normalize
        self.use_gamma, self.use_beta = use_gamma, use_beta
        self.gamma = nn.Parameter(torch.ones(head_dim)) if use_gamma else None
        self.beta = nn.Parameter(torch.zeros(head_dim)) if use_beta else None

    def forward(self, x: Tensor, flatten: bool | None = True) -> Tensor:
        """Returns the features, or with flatten=False the normed x."""
        if self.normalize:
            x = layer_norm(x, self.gamma, self.beta)  # type: ignore[assignment]
        else:
            assert self.gamma is not None
            x = x * self.gamma if self.beta is None else torch.addcmul(self.beta, x, self.gamma)
        if not flatten:
            return x
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        return torch.cat([squares, mixed * 2**0.5], -1) * self.head_dim**-0.5


class _Activation(nn.Module):
    name: str

    def forward(self, x: Tensor) -> Tensor:
        return ACT2FN[self.name](x)


class ReLUFeatureMap(_Activation):
    """max(x, 0)."""

    name = "relu"


class SquaredReLUFeatureMap(_Activation):
    """max(x, 0)^2."""

    name = "sqrelu"


class GELUFeatureMap(_Activation):
    """GELU in its tanh form."""

    name = "gelu"


class SwishFeatureMap(_Activation):
    """x sigmoid(x)."""

    name = "swish"


class SigmoidFeatureMap(_Activation):
    """1 / (1 + exp(-x))."""

    name = "sigmoid"
