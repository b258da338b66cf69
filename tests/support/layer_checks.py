"""Comparisons for tests of layers: gradients, and outputs of calls that continue from a state."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def assert_same_gradients(
    actual: Tensor,
    expected: Tensor,
    inputs: Sequence[Tensor],
    expected_inputs: Sequence[Tensor] | None = None,
    **tolerance: float,
) -> None:
    """Asserts equal gradients of `inputs` and `expected_inputs` (by default the same) for a random
    output gradient."""
    grad = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad(actual, inputs, grad),
        torch.autograd.grad(expected, inputs if expected_inputs is None else expected_inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e, **tolerance)


def functions_of_positions(heads: int) -> tuple[dict[str, Callable[..., Tensor]], nn.Parameter]:
    """A mask and a score_mod that are functions, as options of a layer, and what they capture."""
    table = nn.Parameter(torch.randn(7, heads, dtype=torch.float64))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * torch.cos(0.3 * (q - k)) + table[k % 7, h] * (q % 5)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k) % 3 != 1) | (k == 2)

    return {"mask": mask, "score_mod": score_mod}, table


@torch.no_grad()
def in_steps(
    layer: nn.Module, x: Tensor, rope: Callable[[Tensor], object]
) -> tuple[Tensor, object]:
    """The output for x (B, 11, dim) in calls of several tokens and of one, and the last state."""
    state = layer.new_state(*x.shape[:2])
    parts = [
        layer(x[:, a:b], rope=rope(torch.arange(a, b)), state=state)
        for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11))
    ]
    return torch.cat(parts, 1), state
