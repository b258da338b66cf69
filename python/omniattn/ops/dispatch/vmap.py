"""torch.vmap over ops: one call per element, or a single call if the op can fold the batch.

If all mapped tensors have a batch dimension of their own, and nothing else depends on the index in
the batch, both dimensions are merged for one call (`Fold`). Otherwise the op is called once per
element, and the results are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_leaves, tree_map

from omniattn.ops.dispatch.names import Schema, call_by_name

__all__ = [
    "Fold",
    "Layout",
    "any_batched",
    "flatten",
    "map_batch",
    "over_batched",
    "register_vmap",
    "unflatten",
]

#: For each argument the length of a list of tensors, or None; None if an op takes no lists.
Layout = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Fold:
    """Arguments that vmap can map over in one call.

    The first dimension of these arguments, of all outputs and of incoming gradients (`grad_y`) is a
    batch of independent problems. A call that computes the gradient of another argument cannot be
    folded, since vmap needs one gradient per element.
    """

    names: tuple[str, ...]
    #: Predicate on named arguments: True if no other argument depends on the index in the batch.
    when: Callable[..., bool] | None = None

    def places(self, schema: Schema, args: Sequence[Any]) -> list[int]:
        """Returns the indices of the arguments that this call can be mapped over."""
        values = schema.by_name(args, {})
        others = [n for n in schema.arguments if n.removesuffix("_grad") not in self.names]
        if any(n.endswith("_grad") and values[n] for n in others):
            return []
        if self.when is not None and not call_by_name(self.when, values):
            return []
        folded = [n in self.names or n.startswith("grad_") for n in schema.arguments]
        return [i for i, is_folded in enumerate(folded) if is_folded and args[i] is not None]


def register_vmap(name: str, fold: Fold | None = None) -> None:
    """Registers the vmap rule of an internal op."""
    op, schema = getattr(torch.ops.omniattn, name).default, Schema(name)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        places = [] if fold is None else fold.places(schema, args)
        return map_batch(name, op, places, info.batch_size, args, in_dims)

    torch.library.register_vmap(f"omniattn::{name}", rule)


def map_batch(
    name: str,
    call: Callable[..., Any],
    places: Sequence[int],
    size: int,
    args: tuple[Any, ...],
    dims: tuple[Any, ...],
) -> tuple[Any, int]:
    """Returns the results of `call` on a batch of arguments, and their batch dimension.

    `dims` has the batch dimension of each tensor of `args`, None if the batch shares it.
    `places` are the indices of the arguments that can be folded into one call.
    """
    if size == 0:
        raise ValueError(f"{name}: vmap must be over at least one element, got a batch size of 0")

    def batch(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)

    def select(value: Any, dim: Any, i: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [select(v, d, i) for v, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, i)

    batches = {i: batch(args[i], dims[i]) for i in places}
    mapped = {i for i, dim in enumerate(dims) if any(d is not None for d in tree_leaves(dim))}
    if mapped <= batches.keys() and all(t.dim() > 2 for t in batches.values()):
        # An expanded batch is a view, but ops require contiguous saved tensors.
        folded = (
            batches[i].flatten(0, 1).contiguous() if i in batches else a for i, a in enumerate(args)
        )
        return tree_map(lambda t: t.unflatten(0, (size, t.shape[0] // size)), call(*folded)), 0
    calls = [
        call(*(select(a, dim, i) for a, dim in zip(args, dims, strict=True))) for i in range(size)
    ]
    return tree_map(lambda *results: torch.stack(results), *calls), 0


def any_batched(tensors: Sequence[Tensor | None]) -> bool:
    """Returns True if autograd has batched a tensor (`is_grads_batched`)."""
    return any(t is not None and is_legacy_batchedtensor(t) for t in tensors)


def over_batched(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor | None]
) -> list[Any]:
    """Maps a function over the tensors that autograd has batched, by torch.vmap: autograd's own
    batches are of an older kind, without rules for lists and for functions in Python."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    missing: list[bool] = []

    def call(*given: Tensor | None) -> tuple[Tensor, ...]:
        found = function(*given)
        missing[:] = [t is None for t in found]
        return tuple(t for t in found if t is not None)

    dims = tuple(None if t is None or not is_legacy_batchedtensor(t) else 0 for t in tensors)
    plain = (
        t if t is None or dim is None else torch._remove_batch_dim(t, level, 1, 0)
        for t, dim in zip(tensors, dims, strict=True)
    )
    results = iter(torch.func.vmap(call, dims)(*plain))
    return [None if no else torch._add_batch_dim(next(results), 0, level) for no in missing]


def flatten(layout: Layout, args: Sequence[Any]) -> Sequence[Any]:
    """Replaces lists among the arguments of an op by their elements."""
    if layout is None:
        return args
    flat: list[Any] = []
    for a, length in zip(args, layout, strict=True):
        if length is None:
            flat.append(a)
        else:
            flat.extend([None] * length if a is None else a)
    return flat


def unflatten(layout: Layout, flat: Sequence[Any]) -> tuple[Any, ...]:
    if layout is None:
        return tuple(flat)
    values = iter(flat)
    return tuple(next(values) if n is None else [next(values) for _ in range(n)] for n in layout)
