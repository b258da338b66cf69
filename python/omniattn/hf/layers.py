"""What layers of transformers compute, on this package's kernels.

Each is a forward for modules that hold the parameters under transformers' names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from omniattn import functional

__all__ = [
    "MLPS",
    "NORMS",
    "causal_lm_loss",
    "eps",
    "layer_norm",
    "linear",
    "rms_norm",
    "rms_norm_gemma",
    "rms_norm_llama",
]


def linear(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight, self.bias)


def eps(module: Any) -> float:
    """eps of a norm, NaN if it has none."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return math.nan


def rms_norm(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=eps(self))


def rms_norm_llama(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=eps(self), casting="llama")


def rms_norm_gemma(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=eps(self), offset=1.0)


def layer_norm(self: Any, x: Tensor) -> Any:
    return functional.layer_norm(x, self.weight, getattr(self, "bias", None), eps=eps(self))


NORMS = (rms_norm, rms_norm_llama, rms_norm_gemma, layer_norm)


def _mlp(self: Any, x: Tensor, glu: Callable[..., Tensor]) -> Any:
    """A gated MLP, its projections under one of the three sets of names."""
    if hasattr(self, "gate_proj"):
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x)))
    if hasattr(self, "gate_up_proj"):
        return self.down_proj(glu(self.gate_up_proj(x)))
    hidden = self.dropout(glu(self.wi_0(x), self.wi_1(x)))
    weight = self.wo.weight  # T5 may keep it in fp32; quantised it is a method, or int8
    if isinstance(weight, Tensor) and weight.is_floating_point():
        hidden = hidden.to(weight.dtype)
    return self.wo(hidden)


def swiglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.swiglu)


def geglu_tanh_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functools.partial(functional.geglu, approximate="tanh"))


def geglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.geglu)


def reglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.reglu)


MLPS = (swiglu_mlp, geglu_tanh_mlp, geglu_mlp, reglu_mlp)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss without its fp32 copy of the logits."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = functional.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return total
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
