"""Parameters that are stored as DTensors, of which a forward reads this rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from omniattn.modules.experts.expert_parallel import AllToAll

WHOLE = Replicate()


def move(t: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, grad: Placement) -> Tensor:
    """Changes the placement of a rank's t; the gradient of the result has the placement `grad`.

    DTensor chooses the collectives of both directions: from Partial to Replicate is an all-reduce,
    to Shard a reduce-scatter, from Shard to Replicate an all-gather. An input with gradient Partial
    of a layer that all ranks read whole is summed in the backward.
    """
    placed = DTensor.from_local(t, mesh, (have,), run_check=False)
    return placed.redistribute(mesh, (want,)).to_local(grad_placements=(grad,))


class Part(NamedTuple):
    """How a forward gets this rank's part of a parameter.

    Attributes:
        placement: that of the stored DTensor.
        summed: True if a rank's gradient has the terms of its heads or tokens only; the parameter
            is then read whole, and the gradients are summed.
        rows: with `summed`, the slices of dimension 0 to read, in this order; None for all.
        zeroed: True to read zeros, for a bias that another rank adds.
        halves: True if dimension 1 has two halves, of each of which a rank reads its part. They
            are stored in equal parts of the whole, which the ranks exchange.
    """

    placement: Placement = WHOLE
    summed: bool = False
    rows: tuple[slice, ...] | None = None
    zeroed: bool = False
    halves: bool = False

    def read(self, stored: Tensor) -> Tensor:
        """Returns the part of a stored parameter, whose gradient becomes that of the DTensor."""
        assert isinstance(stored, DTensor)
        if self.halves:
            return _own_halves(stored.to_local(), stored.device_mesh)
        if not self.summed:
            return stored.to_local()
        # The backward of a redistribution from Replicate to Replicate sums partial gradients.
        whole = stored.redistribute(stored.device_mesh, (WHOLE,))
        t = whole.to_local(grad_placements=(Partial(),))
        if self.rows is not None:
            parts = [t[rows] for rows in self.rows]
            t = parts[0] if len(parts) == 1 else torch.cat(parts)
        return t * 0 if self.zeroed else t


def _own_halves(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchanges parts of dimension 1 of a whole tensor for this rank's parts of its two halves.

    The whole has 2 N pieces, of which rank r stores 2 r and 2 r + 1 and reads r and N + r. A piece
    is sent once, and its gradient once.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    pieces = t.unflatten(1, (2, -1)).movedim(1, 0)
    readers = [2 * rank % ranks, (2 * rank + 1) % ranks]
    if readers[0] > readers[1]:  # rows are sent in the order of the ranks
        readers, pieces = readers[::-1], pieces.flip(0)
    owners = [rank // 2, (ranks + rank) // 2]
    sent, received = ([of.count(n) for n in range(ranks)] for of in (readers, owners))
    own: Tensor = AllToAll.apply(pieces.flatten(1), sent, received, mesh.get_group())
    return own.view(pieces.shape).movedim(0, 1).flatten(1, 2)


class _ReadsParts(nn.Module):
    """A module whose forward reads its parts of parameters, which are DTensors otherwise.

    Not by hooks, which a recomputation of `forward` alone would not call.
    """

    _parts: list[tuple[str, str, Part]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stored = []
        try:
            for owner, name, part in self._parts:
                place = self.get_submodule(owner)
                whole = place._parameters[name]
                assert whole is not None
                stored.append((place, name, whole))
                place._parameters[name] = part.read(whole)  # type: ignore[assignment]
            return super().forward(*args, **kwargs)
        finally:
            for place, name, whole in stored:
                place._parameters[name] = whole


def read_parts(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Makes the forward of a module read these parts of its parameters, given by their names.

    Its class becomes a subclass, as those of modules that `fully_shard` takes.
    """
    kind = type(module)
    module._parts = [(*name.rpartition(".")[::2], part) for name, part in parts.items()]  # type: ignore[assignment]
    module.__class__ = type(kind.__name__, (_ReadsParts, kind), {})


def distribute(module: nn.Module, mesh: DeviceMesh, parts: Mapping[str, Part]) -> None:
    """Replaces the parameters of a module by DTensors, of rank 0's values."""
    for path, part in parts.items():
        owner, _, name = path.rpartition(".")
        place = module.get_submodule(owner)
        given = place.get_parameter(name)
        placed = distribute_tensor(given.detach(), mesh, (part.placement,))
        place.register_parameter(name, nn.Parameter(placed, given.requires_grad))
