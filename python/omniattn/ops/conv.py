"""causal_conv1d: depthwise convolution over time."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.vmap import Fold

__all__ = ["causal_conv1d", "causal_conv1d_inplace"]


def _channels_last(t: Tensor | None) -> Tensor | None:
    """Makes an empty tensor like a weight or states, with channels contiguous in memory."""
    return None if t is None else t.new_empty(t.mT.shape).mT


def _final_state(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((count, weight.shape[1] - 1, x.shape[2])).mT


#: (x, weight, bias, initial_state, cu_seqlens, silu) -> (y, final_state)
causal_conv1d = DifferentiableOp(
    "causal_conv1d",
    fakes={
        "final_state": _final_state,
        "dweight": lambda weight: _channels_last(weight),
        "dinitial_state": lambda initial_state: _channels_last(initial_state),
    },
    formula=lambda x, weight, bias, state, cu_seqlens, silu: reference.causal_conv1d(
        x,
        weight,
        bias,
        activation="silu" if silu else None,
        initial_state=state,
        return_final_state=True,
        cu_seqlens=cu_seqlens,
    ),
    fold=Fold(("x", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)

#: (x, weight, bias, initial_state, silu) -> y of one token, without gradients, in place.
causal_conv1d_inplace = torch.ops.omniattn.causal_conv1d_.default
_library.register_fake("causal_conv1d_")(lambda x, *_: x.new_empty(x.shape))
