"""Types of functions with option records, as type checkers see them: mypy reads this file.

A wrong call that mypy accepted would leave its `type: ignore` unused, which is an error.
"""

from torch import Tensor

from omniattn import functional, reference


def right(q: Tensor, x: Tensor, index: Tensor) -> list[Tensor]:
    out: Tensor = functional.selected_attention(q, q, q, index, block_size=1, sinks=x, seed=None)
    both: tuple[Tensor, Tensor] = functional.selected_attention(
        q, q, q, index, block_size=1, softcap=1.0, return_lse=True, backend="cpu"
    )
    moba: Tensor = functional.moba_attention(q, q, q, block_size=2, topk=1, scale=None)
    loss: Tensor = functional.linear_cross_entropy(x, x, index, z_loss=1e-4, backend="cpu")
    state: tuple[Tensor, Tensor] = reference.retention(q, q, q, initial_state=x)
    return [out, *both, moba, loss, functional.jsd(x, x, beta=0.0), *state]


def wrong(q: Tensor, x: Tensor, index: Tensor) -> None:
    functional.selected_attention(q, q, q, index, block_size=1, head_scale=x)  # type: ignore[call-overload]
    functional.selected_attention(q, q, q, index, block_size=1, softcap="1")  # type: ignore[call-overload]
    functional.moba_attention(q, q, q, block_size=2, topk=1, sinks=x)  # type: ignore[call-arg]
    functional.moba_attention(q, q, q, block_size=2, topk=1, seed=1)  # type: ignore[arg-type]
    functional.cross_entropy(x, index, z_los=1e-4)  # type: ignore[call-arg]
    functional.linear_jsd(x, x, x, x, softcap=1.0)  # type: ignore[call-arg]
    reference.cross_entropy(x, index, reduction=1)  # type: ignore[arg-type]
    reference.retention(q, q, q, backend="cpu")  # type: ignore[call-arg]
