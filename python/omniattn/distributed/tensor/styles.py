"""Styles for torch's parallelize_module: what the ranks exchange before and after a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from omniattn.checks.arguments import require_rows, shown
from omniattn.distributed.tensor.parts import WHOLE, Part, distribute, move, read_parts
from omniattn.distributed.tensor.splits import OP, Split, parts_of
from omniattn.functional import masks
from omniattn.functional.routing import Routing
from omniattn.modules import Attention
from omniattn.modules.attention._options import slopes_of

#: Dimension of the tokens.
TOKENS = Shard(1)
#: Masks that are the same for all heads.
_OF_ALL_HEADS = (
    *(masks.Causal, masks.SlidingWindow, masks.PrefixLM, masks.Chunked),
    *(masks.KeyLengths, masks.KeyPadding, masks.Documents),
)


def placement_of_tokens(sequence_parallel: bool) -> Placement:
    """Returns how activations between layers are placed."""
    return TOKENS if sequence_parallel else WHOLE


class RandomPerRank:
    """Hooks for a module whose ranks draw different random numbers, as they have different heads or
    tokens. What follows draws the same numbers on all ranks again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.states: list[Tensor] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, _: Any) -> None:
        if module.training:
            seed = int(torch.randint(2**62, ()))
            self.states.append(torch.default_generator.get_state())
            torch.default_generator.manual_seed(seed + self.rank)

    def leave(self, *_: Any) -> None:
        while self.states:
            torch.default_generator.set_state(self.states.pop())


class Around(ParallelStyle):
    """Gives a layer all tokens, and the model the layer's output.

    Args:
        sequence_parallel: True if the model has this rank's tokens before and after the layer.
        split: True if each rank computes a term of the output, False if all compute the whole.
    """

    def __init__(self, sequence_parallel: bool, *, split: bool) -> None:
        super().__init__()
        self.tokens = placement_of_tokens(sequence_parallel)
        self.sequence_parallel = sequence_parallel
        self.result: Placement = Partial() if split else WHOLE

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after)
        return module

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        first, *rest = args or (kwargs["x"],)
        if self.sequence_parallel and kwargs.get("state") is not None:
            raise NotImplementedError(f"{OP}: state must be None with sequence_parallel=True")
        x = self._moved(first, self.tokens, WHOLE, self.result)
        options = self.options(module, x, kwargs)
        return ((x, *rest), options) if args else ((), options | {"x": x})

    def options(self, module: Any, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of the layer."""
        return kwargs

    def after(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return self._moved(y, self.result, self.tokens, self.tokens)

    def _moved(self, t: Any, have: Placement, want: Placement, grad: Placement) -> Tensor:
        if not t.is_nested:
            return move(t, self.mesh, have, want, grad)
        if self.sequence_parallel:
            raise NotImplementedError(
                f"{OP}: nested tensors need sequence_parallel=False, got sequence_parallel=True"
            )
        rows = move(t.values(), self.mesh, have, want, grad)
        return torch.nested.nested_tensor_from_jagged(rows, t.offsets())


class SplitLayer(Around):
    """Splits a layer of `SPLITS` by its heads or hidden channels.

    Args:
        split: split of the layer's config.
        sequence_parallel: True if the layer is given, and returns, this rank's tokens.
        reads: True if the layer itself makes its forward read this rank's parameters; False if a
            module around it does.
    """

    def __init__(self, split: Split, sequence_parallel: bool, *, reads: bool = False) -> None:
        super().__init__(sequence_parallel, split=True)
        self.split = split
        self.reads = reads
        self.parts: dict[str, Part] = {}

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        self.whole = module.config
        rank = device_mesh.get_local_rank()
        self.parts = parts_of(module, self.split, device_mesh.size(), rank)
        count = getattr(module.config, "num_heads", 0)
        self.heads = slice(rank * count, (rank + 1) * count)
        distribute(module, device_mesh, self.parts)
        if self.reads:
            read_parts(module, self.parts)
        if getattr(module.config, "dropout_p", 0.0):
            RandomPerRank(rank).register(module)
        return super()._apply(module, device_mesh)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        args = tuple(self._routing(a) if isinstance(a, Routing) else a for a in args)
        return super().before(module, args, kwargs)

    def _routing(self, routing: Routing) -> Routing:
        """Returns the routing of all tokens, whose weights get a term of their gradient."""
        experts, weights = (
            self._moved(t, self.tokens, WHOLE, self.result)
            for t in (routing.experts, routing.weights)
        )
        return routing._replace(experts=experts, weights=weights)

    def options(self, module: Any, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        found = {
            name: adapt(self, kwargs[name])
            for name, adapt in _ADAPTED.items()
            if kwargs.get(name) is not None
        }
        if isinstance(module, Attention) and self.whole.alibi is not None:
            slopes = slopes_of(self.whole, kwargs.get("alibi_slopes"), x)
            found["alibi_slopes"] = slopes[self.heads]
        return kwargs | found


def _mask(style: SplitLayer, mask: Any) -> Any:
    """Returns the mask of a rank's heads."""
    heads, first = style.heads, style.heads.start
    if isinstance(mask, Tensor):
        is_per_head = mask.dim() > 2 and mask.shape[-3] > 1
        return mask[..., heads, :, :] if is_per_head else mask
    if isinstance(mask, _OF_ALL_HEADS):
        return mask
    if isinstance(mask, masks.Mask) or not callable(mask):
        known = ", ".join(kind.__name__ for kind in _OF_ALL_HEADS)
        raise NotImplementedError(
            f"{OP}: mask of split heads must be a tensor, a function or one of {known}, "
            f"got mask={shown(mask)}"
        )
    see: Callable[..., Any] = mask
    return lambda b, h, q, k: see(b, h + first, q, k)


def _score_mod(style: SplitLayer, score_mod: Callable[..., Any]) -> Callable[..., Any]:
    first = style.heads.start
    return lambda score, b, h, q, k: score_mod(score, b, h + first, q, k)


def _refused(name: str) -> Callable[[SplitLayer, Any], Any]:
    def refuse(style: SplitLayer, value: Any) -> Any:
        raise NotImplementedError(f"{OP}: {name} must be None for split heads, got {shown(value)}")

    return refuse


_ADAPTED: dict[str, Callable[[SplitLayer, Any], Any]] = {
    "mask": _mask,
    "score_mod": _score_mod,
    "bias": _refused("bias"),
    "relative": _refused("relative"),
    "convolve": _refused("convolve"),
}


class SplitRows(ParallelStyle):
    """Splits an embedding by its rows: a rank looks up those that it has, and the ranks sum."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        self.rows = module.num_embeddings
        module.num_embeddings = self.rows // device_mesh.size()
        self.first = device_mesh.get_local_rank() * module.num_embeddings
        distribute(module, device_mesh, {"weight": Part(Shard(0))})
        read_parts(module, {"weight": Part(Shard(0))})
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)
        return module

    def before(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (index,) = args
        require_rows("Embedding", module.name, index, self.rows)
        local = index.long() - self.first
        self.outside = (local < 0) | (local >= module.num_embeddings)
        return (local.masked_fill(self.outside, 0),)

    def after(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        y = y.masked_fill(self.outside[..., None], 0.0)
        return move(y, self.mesh, Partial(), WHOLE, WHOLE)
