"""Computes the loss of a causal language model from its hidden states, without logits.

In training, the head of a patched model returns a DeferredLogits. It records what the model applies
to its logits before the loss, a scale (Cohere, Granite) and a softcap (Gemma 2), so that the loss
is one call of functional.linear_cross_entropy. Any other operation on it computes the logits, for
example an adapter on the head or a loss of the model's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from omniattn import functional
from omniattn.hf.common import packed
from omniattn.hf.common.probe import Forward
from omniattn.hf.no_logits import missing_logits

__all__ = [
    "DeferredLogits",
    "call_head",
    "causal_lm_forward",
    "causal_lm_loss",
    "head",
    "packed_causal_lm_forward",
    "plain_head",
]

Number = float  # DeferredLogits.float shadows the builtin in its annotations
#: Function that computes a loss from the head's input, weight and bias.
Loss = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def head(self: Any, x: Tensor, loss: Loss | None = None) -> Tensor:
    """Computes nn.Linear's forward, or `loss`: only here has FSDP2 gathered the weight."""
    if loss is not None:
        return loss(x, self.weight, self.bias)
    return functional.linear(x, self.weight, self.bias)


def plain_head(self: Any, x: Tensor, loss: Loss | None = None) -> Tensor:
    """Computes :func:`head` with torch's own linear."""
    if loss is not None:
        return loss(x, self.weight, self.bias)
    return nn.functional.linear(x, self.weight, self.bias)


def call_head(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `__call__` of a head; skips the hooks while logits are deferred."""
    if self.omniattn_defers and len(args) == 1 and not kwargs:
        return DeferredLogits(self, *args)
    return nn.Module.__call__(self, *args, **kwargs)


class DeferredLogits:
    """Represents scale * head(x) or cap * tanh(scale * head(x)), computed only when needed.

    Args:
        head: module with a forward of this file.
        x: (..., K).
        scale, cap: of the formula; cap is None without tanh.
        steps: operations that the model applied, repeated when the logits are computed.
    """

    def __init__(
        self,
        head: Any,
        x: Tensor,
        scale: Number = 1.0,
        cap: Number | None = None,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> None:
        self.head = head
        self.x = x
        self.scale = scale
        self.cap = cap
        self.steps = steps
        self.made: Tensor | None = None

    def tensor(self) -> Tensor:
        """Computes the logits (..., V)."""
        if self.made is None:
            logits = nn.Module.__call__(self.head, self.x)
            for step in self.steps:
                logits = step(logits)
            self.made = logits
        return self.made

    def may_be_left_out(self, vocab_size: int) -> bool:
        """Returns True if the logits were never computed and have the expected size."""
        return self.made is None and self.shape[-1] == vocab_size

    def cross_entropy(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """Computes the cross entropy of the logits; target has one element for each row of x."""
        cap = self.cap or 0.0
        scale = self.scale * (self.cap or 1.0)

        def loss(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if scale != 1.0:
                x, bias = x * scale, None if bias is None else bias * scale
            return functional.linear_cross_entropy(
                x.reshape(-1, x.shape[-1]),
                weight,
                target,
                bias=bias,
                ignore_index=ignore_index,
                softcap=cap,
                reduction=reduction,
            )

        result: Tensor = nn.Module.__call__(self.head, self.x, loss)
        return result

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.head.out_features))

    def float(self) -> DeferredLogits:
        return self._then(Tensor.float, self.scale, self.cap)  # the loss is always in fp32

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self._then(lambda logits: logits.to(*args, **kwargs), self.scale, self.cap)

    def tanh(self) -> Any:
        return (
            self._then(Tensor.tanh, self.scale, 1.0) if self.cap is None else self.tensor().tanh()
        )

    def __mul__(self, factor: Any) -> Any:
        if not _is_number(factor):
            return self.tensor() * factor
        return self._times(factor, lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not _is_number(divisor):
            return self.tensor() / divisor
        return self._times(1 / divisor, lambda logits: logits / divisor)

    def _times(self, factor: Any, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
        if self.cap is None:
            return self._then(step, self.scale * factor, None)
        return self._then(step, self.scale, self.cap * factor)

    def _then(
        self, step: Callable[[Tensor], Tensor], scale: Number, cap: Number | None
    ) -> DeferredLogits:
        return DeferredLogits(self.head, self.x, scale, cap, (*self.steps, step))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tanh, nn.functional.tanh) and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_tensor(name: str) -> Callable[..., Any]:
    """Returns an operator that computes the logits and applies itself to them."""
    return lambda self, *args: getattr(self.tensor(), name)(*args)


# Python looks operators up in the class, not through __getattr__.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__neg__", "__pow__"),
    *("__matmul__", "__getitem__", "__setitem__", "__len__", "__iter__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(DeferredLogits, _name, _of_tensor(_name))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and x > 0


def causal_lm_loss(
    logits: Tensor | DeferredLogits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes transformers' ForCausalLMLoss without an fp32 copy of the logits."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    if isinstance(logits, DeferredLogits) and not logits.may_be_left_out(vocab_size):
        logits = logits.tensor()
    if isinstance(logits, DeferredLogits):
        total = logits.cross_entropy(target, ignore_index, reduction)
    else:
        flat = logits.view(-1, vocab_size)
        total = functional.cross_entropy(
            flat, target, ignore_index=ignore_index, reduction=reduction
        )
    if num_items_in_batch is None:
        return total
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


@functools.cache
def packed_causal_lm_forward(original: Any) -> Forward | None:
    """Returns :func:`causal_lm_forward` for a model with recurrent layers."""
    return _causal_lm_forward(packed.model_forward(original))


@functools.cache
def causal_lm_forward(original: Any) -> Forward | None:
    """Returns a model's forward that computes no logits in training with labels.

    The forward takes `skip_logits` as Liger's does: True skips the logits in evaluation as well,
    False computes them in training. Returns None if the class's forward takes no labels.
    """
    return _causal_lm_forward(original.forward)


def _causal_lm_forward(own: Forward) -> Forward | None:
    names = list(inspect.signature(own).parameters)
    if "labels" not in names:
        return None
    position = names.index("labels") - 1

    @functools.wraps(own)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if skip_logits and labels is None:
            raise ValueError("omniattn.hf: skip_logits=True needs labels, got labels=None")
        skips = labels is not None and (self.training if skip_logits is None else skip_logits)
        heads = _heads(self) if skips and self.loss_function is causal_lm_loss else []
        for each in heads:
            each.omniattn_defers = True
        try:
            output = own(self, *args, **kwargs)
        finally:
            for each in heads:
                each.omniattn_defers = False
        return _without_logits(self, output) if heads else output

    return forward


def _heads(model: Any) -> list[Any]:
    """Returns the heads that can compute the loss: one, plus any copies that PEFT trains."""
    return [each for each in model.get_output_embeddings().modules() if _is_free(each)]


def _is_free(module: nn.Module) -> bool:
    """Returns True if a patched head has no hooks or wrappers that would read its logits."""
    if type(module).__call__ is not call_head or "forward" in module.__dict__:
        return False
    if hasattr(module, "unshard"):  # FSDP2's hooks gather the weight for any call
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and not hasattr(type(module.weight), "__tensor_flatten__")


def _without_logits(model: Any, output: Any) -> Any:
    """Replaces deferred logits in an output by NO_LOGITS, or by the logits if computed."""
    missing = missing_logits(model)

    def made(value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        return missing if value.made is None else value.made

    if isinstance(output, tuple):
        return tuple(map(made, output))
    return type(output)(**{name: made(each) for name, each in output.items()})
