"""Largest memory of a rank's training step, from its forwards and backwards on the meta device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniattn.models.decoders.decoder import Decoder

#: Bytes of the rows that experts process at a time, at most (csrc/ops/layers/moe_routing_cpu.cpp).
#: The rows of a single expert may have more.
_WAVE = 2**25


def _of_experts(given: Mapping[str, Any], widths: Callable[[int, int], int]) -> int:
    """Returns the bytes of the rows that a kernel of experts has besides its results, from their
    `widths(features, columns)`, columns of gate and value."""
    x, down, rows = given["x"], given["down"], given["index"].numel()
    wide = torch.promote_types(x.dtype, torch.float32).itemsize
    row = wide * widths(down.shape[2], given["up"].shape[1])
    at_once = max(_WAVE // max(1, row), math.ceil(rows / len(down)))
    return min(rows, at_once) * row + rows * x.shape[-1] * wide


def _of_hidden(given: Mapping[str, Any], rows: int) -> int:
    """Returns the bytes of `rows` hidden rows of an MLP for each token."""
    x, hidden = given["x"], given["down_weight"].shape[1]
    return int(rows * x.shape[:-1].numel() * hidden * x.itemsize)


#: Bytes of memory that a kernel uses while it runs, of those with more than a few rows of it.
_WORKING: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "glu_mlp_raw": lambda given: _of_hidden(given, 1),
    "glu_mlp_backward": lambda given: _of_hidden(given, 2),
    "moe_raw": lambda given: _of_experts(given, lambda f, c: given["x"].shape[-1] + f),
    "moe_backward": lambda given: _of_experts(
        given, lambda f, c: 2 * given["x"].shape[-1] + c + f + (0 if len(given["pre"]) else c)
    ),
}


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that ops made and that still exist.

    `peak` is their largest number so far, with the working memory of large kernels. Storages of
    `others` do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes = {t.untyped_storage()._cdata: 0 for t in others}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        if func.namespace == "omniattn" and (working := _WORKING.get(func._schema.name[10:])):
            names = (argument.name for argument in func._schema.arguments)
            self.peak = max(self.peak, self.bytes + working(dict(zip(names, args, strict=False))))
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


class Stage:
    """A rank's layers, which compute microbatches on the meta device.

    Args:
        model: a decoder, or a stage of one, with the rank's parts of its layers.
        tokens: (B, T) of a microbatch; `given` has the inputs of a stage after the first.
        shards: number of ranks that share parameters and gradients by FSDP2.
    """

    def __init__(
        self, model: Decoder, tokens: Tensor, given: Sequence[Tensor] | None, shards: int
    ) -> None:
        self.model, self.tokens, self.given, self.shards = model, tokens, given, shards
        self.is_stage = hasattr(model, "is_last")
        self.is_last = not self.is_stage or bool(cast(Any, model).is_last)

    def forward(self) -> Sequence[Tensor]:
        """Returns the loss of a microbatch, or what goes to the next stage."""
        inputs: Sequence[Tensor] = (self.tokens,)
        if self.given is not None:
            inputs = [torch.empty_like(t).requires_grad_() for t in self.given]
        if not self.is_stage:
            return (self.model(*inputs, self.tokens),)
        out = self.model(*inputs, targets=self.tokens if self.is_last else None)
        return out if isinstance(out, tuple) else (out,)

    def peak(self, parts: int, in_flight: int) -> int:
        """Returns the most bytes of activations, gathered weights and gradients at once.

        Args:
            parts: number of microbatches of a step.
            in_flight: number of them whose activations exist at once.
        """
        gradients: dict[nn.Parameter, Tensor] = {}
        root = [p for name, p in self.model.named_parameters() if not name.startswith("layers.")]

        def reduce(p: nn.Parameter) -> None:
            assert p.grad is not None
            rows, *rest = p.shape
            size = math.ceil(rows / self.shards) * math.prod(rest)
            if p not in gradients:
                gradients[p] = p.grad.new_empty(size)
            p.grad = None

        hooks = []
        if self.shards > 1:
            own = [p for block in self.model.layers for p in block.parameters()]
            hooks = [p.register_post_accumulate_grad_hook(reduce) for p in own]
        with Live([*self.model.parameters(), *self.model.buffers()]) as live:
            for _ in range(min(2, math.ceil(parts / in_flight))):
                outs = [self.forward() for _ in range(in_flight)]
                while outs:
                    last = outs.pop(0)
                    torch.autograd.backward(list(last), [torch.empty_like(t) for t in last])
                    del last
                for p in root if self.shards > 1 else ():
                    if p.grad is not None:
                        reduce(p)
        for hook in hooks:
            hook.remove()
        for p in self.model.parameters():
            p.grad = None
        return live.peak + self._gathered(root)

    def _gathered(self, root: Sequence[nn.Parameter]) -> int:
        """Returns the bytes of weights that FSDP2 gathers: those outside of blocks, which stay,
        and those of two blocks."""
        if self.shards == 1:
            return 0
        blocks = [sum(p.nbytes for p in block.parameters()) for block in self.model.layers]
        return sum(p.nbytes for p in root) + 2 * max(blocks, default=0)
