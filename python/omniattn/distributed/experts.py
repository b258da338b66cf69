"""expert_parallel: a model whose experts are divided among ranks."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from omniattn.checks.arguments import require_bool, shown
from omniattn.distributed.tensor.parts import Part, distribute, read_parts
from omniattn.modules import MoE
from omniattn.modules.experts.expert_parallel import SplitExperts

M = TypeVar("M", bound=nn.Module)
OP = "expert_parallel"


def expert_parallel(model: M, mesh: DeviceMesh, *, overlap: bool = False) -> M:
    """Divides the experts of a model over the ranks of a mesh, in place.

    Rank r of N computes experts r E / N to (r + 1) E / N - 1 of each MoE layer, for the tokens of
    all ranks, as :class:`omniattn.modules.ExpertParallel` does. The rest of the model stays whole.
    Ranks have different parts of the batch. The stacked weights become DTensors with their names
    and shapes, so that checkpoints and torch's optimizers need nothing else.

    The gradient of an expert is the sum over the tokens of all ranks, each with the loss of its
    rank; that of other parameters is this rank's, to be summed or averaged by `fully_shard`.

    Args:
        model: a model with MoE layers, equal on all ranks. Apply `tensor_parallel`, over another
            dimension of the mesh, and `fully_shard` after this.
        mesh: mesh of one dimension with N ranks, such as ``mesh["ep"]``. N divides the number of
            experts.
        overlap: as of :class:`omniattn.modules.ExpertParallel`.

    Returns:
        The model.

    Raises:
        TypeError: the mesh is not a DeviceMesh.
        ValueError: the mesh has several dimensions, the model has no MoE layer, or N does not
            divide the experts. Nothing has been changed then.

    Reference:
        Lepikhin et al., GShard, 2020, arXiv:2006.16668.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{OP}: mesh must be a DeviceMesh, got mesh={shown(mesh)}")
    require_bool(OP, "overlap", overlap)
    if mesh.ndim != 1:
        raise ValueError(f"{OP}: mesh must have one dimension, as mesh['ep'], got mesh={mesh}")
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    if not layers:
        raise ValueError(f"{OP}: model must have MoE layers, got {type(model).__name__} without")
    for layer in layers:
        if layer.config.experts.experts % mesh.size():
            raise ValueError(
                f"{OP}: the ranks must divide the experts, got "
                f"experts={layer.config.experts.experts}, ranks={mesh.size()}"
            )
    for layer in layers:
        experts = layer.experts
        experts.__class__ = SplitExperts
        assert isinstance(experts, SplitExperts)
        experts.divide(mesh.get_group())
        experts.overlap = overlap
        parts = {name: Part(Shard(0)) for name, _ in experts.named_parameters()}
        distribute(experts, mesh, parts)
        read_parts(experts, parts)
    return model
