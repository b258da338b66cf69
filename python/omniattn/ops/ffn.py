"""glu_mlp: the projections and the activation of a feed-forward layer as one op.

The op saves the projections but not the activated hidden layer; with `recompute` it saves only its
inputs. The kernels are in csrc/ops/layers/ffn.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from omniattn import reference
from omniattn.ops.activation import ACTIVATION_NAMES, CLAMPED
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.vmap import Fold

__all__ = ["glu_mlp"]


def _result(x: Tensor, down_weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], down_weight.shape[0]))


def _projection(x: Tensor, weight: Tensor | None, recompute: bool) -> Tensor:
    """Returns an empty saved projection, or a tensor of size 0 if not saved."""
    if weight is None or recompute:
        return x.new_empty(0)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _gradients(
    needs: Sequence[bool],
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> list[Tensor]:
    inputs = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    pairs = zip(inputs, needs, strict=False)
    return [x.new_empty(0) if t is None or not need else like(t) for t, need in pairs]


_backward_op = BackwardOp("glu_mlp_backward", fakes={"y": _gradients})


def _backward(*arguments: Any) -> dict[str, Tensor]:
    return dict(zip(glu_mlp.schema.tensors, _backward_op.call(*arguments), strict=False))


def _formula(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    act: int,
    clamp: list[float],
    recompute: bool,
    native: bool,
    split_bf16: int,
) -> Tensor:
    options: dict[str, Any] = {
        "down_bias": down_bias,
        "activation": ACTIVATION_NAMES[act],
        "dropout_p": dropout_p,
        "seed": seed,
    }
    if up_weight is None:
        return reference.mlp(x, gate_weight, down_weight, up_bias=gate_bias, **options)
    options |= {"gate_bias": gate_bias, "up_bias": up_bias}
    if clamp:
        options |= {"activation": CLAMPED, "alpha": clamp[0], "limit": clamp[1]}
    return reference.glu_mlp(x, gate_weight, up_weight, down_weight, **options)


#: (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, seed, dropout_p, act,
#: clamp, recompute, native, split_bf16) -> y
glu_mlp = DifferentiableOp(
    "glu_mlp",
    fakes={
        "y": _result,
        "gate": lambda x, gate_weight, recompute: _projection(x, gate_weight, recompute),
        "up": lambda x, up_weight, recompute: _projection(x, up_weight, recompute),
    },
    private=("gate", "up"),
    backward=_backward,
    backward_op=_backward_op.of(needs="wanted"),
    formula=_formula,
    fold=Fold(("x",), when=lambda seed: seed is None),
)
