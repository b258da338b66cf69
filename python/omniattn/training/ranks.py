"""The ranks of a training run: how model, batches and tokens are divided among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omniattn.checks.arguments import shown
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.routers import Routers
from omniattn.modules import MoE
from omniattn.modules.experts.expert_parallel import SplitExperts
from omniattn.training.optimizer import clip_gradients, gradient_norm, scale_gradients
from omniattn.training.peers import Peers
from omniattn.training.pipeline import chosen_schedule
from omniattn.training.tasks import Batch, targets_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor import Shard

# DTensor, fully_shard and what stands on them are imported by runs on a mesh only: 1 s.

T = TypeVar("T")

#: Dimensions of a mesh: of layers; of the batch, whose ranks have the same parameters ("dp") or
#: parts of them ("fsdp"); of the tokens; of batch and experts; of heads and hidden channels.
DIMENSIONS = ("pp", "dp", "fsdp", "cp", "ep", "tp")


class Ranks:
    """Divides a run among the ranks of a mesh, so that its steps are those of one process.

    "dp", "fsdp" and "ep" ranks have parts of the batch, "cp" ranks parts of its tokens. Parameters
    are sharded over all of them by `fully_shard`, but experts not over "ep", which divides them,
    and with "fsdp" nothing over "dp". "tp" is `tensor_parallel`, "pp" `pipeline_parallel`.

    Args:
        mesh: mesh with some of DIMENSIONS, in this order; None for one process.
        stages_per_rank: number of stages of each rank of "pp".

    Attributes:
        replicas, replica: number of parts of a batch, and the number of this rank's.
        group: process group of the ranks with the same layers and other tokens, None for one.
        stages: this rank's stages of a pipeline, after `split`; none without "pp".
        not_finite: ranks with numbers that are not finite in the last call of `sums`.
    """

    def __init__(self, mesh: DeviceMesh | None, stages_per_rank: int = 1) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or names != tuple(n for n in DIMENSIONS if n in names)):
            raise ValueError(
                f"Trainer: mesh must have dimensions named {', '.join(DIMENSIONS)}, or some of "
                f"them in this order, got mesh={mesh}"
            )
        self.mesh = mesh
        self._parts = {name: mesh[name] for name in names} if mesh is not None else {}
        self.replicas, self.replica = 1, 0
        for name in ("dp", "fsdp", "ep"):
            if name in names:
                size = self._parts[name].size()
                self.replicas *= size
                self.replica = self.replica * size + self._parts[name].get_local_rank()
        self.data = self._joined("dp", "fsdp", "cp", "ep")
        self.group = None if self.data is None else self.data.get_group()
        # Ranks with other layers or tokens, whose losses are summed.
        self._others = self._joined("pp", "dp", "fsdp", "cp", "ep")
        self.stages: list[PipelineStage] = []
        self._stages_per_rank = stages_per_rank
        self.not_finite: list[int] = []
        self.is_first = mesh is None or dist.get_rank() == 0
        self._peers = None if mesh is None else Peers()

    def _joined(self, *names: str) -> DeviceMesh | None:
        """Returns one dimension of all ranks of some dimensions of the mesh, None for one rank."""
        found = tuple(name for name in names if name in self._parts)
        if not found or self.mesh is None:
            return None
        return self._parts[found[0]] if len(found) == 1 else self.mesh[found]._flatten()

    def _sharding(self, *names: str) -> DeviceMesh | None:
        """Returns the mesh of `fully_shard` that shards over these dimensions besides dp or fsdp.

        With fsdp it has two dimensions, of which the first one replicates.
        """
        if "fsdp" not in self._parts:
            return self._joined("dp", *names)
        shard = self._joined("fsdp", *names)
        if "dp" not in self._parts or self.mesh is None or shard is None:
            return shard
        names = ("dp", *(shard.mesh_dim_names or ()))
        return self.mesh[names]

    def named(self, where: str) -> AbstractContextManager[None]:
        """Returns a context whose errors name the rank that they come from."""
        return nullcontext() if self._peers is None else self._peers.named(where)

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Requires that all ranks have the same values.

        Raises:
            ValueError: on all ranks.
        """
        if self.mesh is None:
            return
        own = {name: (repr(value), shown(value)) for name, value in values.items()}
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        for name in dict.fromkeys(name for one in found for name in one):
            first, *others = (one.get(name, ("", "none")) for one in found)
            for rank, other in enumerate(others, 1):
                if other[0] != first[0]:
                    raise ValueError(
                        f"Trainer: {name} must be the same on all ranks, "
                        f"got {first[1]} on rank 0, {other[1]} on rank {rank}"
                    )

    def require_batch(self, batch: int, accumulate: int, length: int) -> None:
        """Requires examples for each part of a batch, and as many tokens for each rank of cp."""
        if self.mesh is not None and batch < accumulate * self.replicas:
            raise ValueError(
                "Trainer: batch must be at least accumulate times the ranks that divide it, "
                f"got batch={batch}, accumulate={accumulate}, {self._sizes('dp', 'fsdp', 'ep')}"
            )
        if "pp" in self._parts and batch % (accumulate * self.replicas):
            raise ValueError(
                "Trainer: the parts of a batch must have the same size with pp, got "
                f"batch={batch}, accumulate={accumulate}, {self._sizes('pp', 'dp', 'fsdp', 'ep')}"
            )
        cp = self._parts.get("cp")
        if cp is not None and length % (2 * cp.size()):
            raise ValueError(
                "Trainer: length must be a multiple of twice the ranks of cp, "
                f"got length={length}, cp={cp.size()}"
            )

    def schedule(self, name: str | None, accumulate: int) -> str | None:
        """Returns the schedule of a pipeline, None without one; requires that it can run."""
        count = self._stages_per_rank
        if "pp" in self._parts:
            return chosen_schedule(name, count, accumulate, self._parts["pp"].size())
        if name is not None or count != 1:
            raise ValueError(
                "Trainer: pp_schedule must be None and stages_per_rank 1 without pp, got "
                f"pp_schedule={shown(name)}, stages_per_rank={count}"
            )
        return None

    def split(self, model: nn.Module) -> None:
        """Divides a model's parameters among the ranks.

        Raises:
            ValueError, NotImplementedError: the model has no such division.
        """
        if self.mesh is None:
            return
        from omniattn.distributed import expert_parallel, pipeline_parallel, tensor_parallel

        if not isinstance(model, Decoder):
            raise NotImplementedError(
                f"Trainer: mesh must be None except for decoders, got {type(model).__name__}"
            )
        if self._joined("dp", "fsdp", "cp") is not None:
            for layer in model.modules():
                if isinstance(layer, MoE) and layer.config.gate.router_grad == "default_vector":
                    raise NotImplementedError(
                        "Trainer: router_grad='default_vector' is not supported with dp, fsdp and "
                        "cp, as default vectors are means over the tokens of all ranks, "
                        f"got {self._sizes('dp', 'fsdp', 'cp')}"
                    )
        cp = self._parts.get("cp")
        Routers(model).balance_over(self.group, None if cp is None else cp.get_group())
        if "ep" in self._parts:
            expert_parallel(model, self._parts["ep"])
        if "tp" in self._parts:
            tensor_parallel(model, self._parts["tp"])
        if "pp" in self._parts:
            count = self._stages_per_rank
            self.stages = pipeline_parallel(model, self._parts["pp"], stages_per_rank=count)
        if self.data is not None:
            self._shard(model)

    def _shard(self, model: Decoder) -> None:
        """Shards parameters, and sums their gradients over the ranks with different tokens."""
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.tensor import Shard

        from omniattn.distributed.pipeline import Elsewhere

        mesh, own = self._sharding("cp", "ep"), self._sharding("cp")
        ignored: set[nn.Parameter] = set()
        for layer in [m for m in model.modules() if isinstance(m, SplitExperts)]:
            if own is None:
                ignored |= set(layer.parameters())
                continue
            # A rank of ep may have fewer experts than there are ranks to shard over.
            place = Shard(0 if layer.local % own.size(own.ndim - 1) == 0 else 1)
            fully_shard(layer, mesh=own, shard_placement_fn=partial(_placed, place))
        for block in model.layers:
            if not isinstance(block, Elsewhere):
                fully_shard(block, mesh=mesh, ignored_params=ignored)
        roots = [stage.submod for stage in self.stages] or [model]
        for root in roots:
            fully_shard(root, mesh=mesh, ignored_params=ignored)
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                # The loss of a rank is its share of the whole, so that gradients are sums.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _sizes(self, *names: str) -> str:
        return ", ".join(f"{n}={self._parts[n].size()}" for n in names if n in self._parts)

    def own(self, parts: list[T]) -> list[T]:
        """Returns this rank's parts of a batch."""
        return parts[self.replica :: self.replicas]

    @contextmanager
    def tokens(self, batch: Batch, share: float) -> Iterator[tuple[Batch, float]]:
        """Yields this rank's tokens of a part of a batch, and their share of the whole one."""
        if "cp" not in self._parts:
            yield batch, share
            return
        from omniattn.distributed import context_parallel

        kept = targets_of(batch)
        split: dict[str, Any] = {"buffers": batch, "buffer_seq_dims": [1] * len(batch)}
        with context_parallel(self._parts["cp"], **split):
            yield batch, share * targets_of(batch) / max(1, kept)

    def sums(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the sums of numbers over the ranks with other tokens or layers.

        All ranks have the same names. `not_finite` becomes the ranks where a number is not finite.
        """
        if self._others is None or self.mesh is None:
            return values
        own = torch.tensor([*values.values()], dtype=torch.float64, device=self.mesh.device_type)
        found = own.new_empty(self._others.size(), len(own))
        dist.all_gather([*found], own, group=self._others.get_group())
        places = (~found.isfinite()).any(-1).nonzero().flatten()
        self.not_finite = self._others.mesh.flatten()[places.cpu()].tolist()
        return dict(zip(values, found.sum(0).tolist(), strict=True))

    def sum_of_stages(self, value: float) -> float:
        """Returns the sum of a number over the stages of the pipeline."""
        assert self.mesh is not None
        total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total, group=self._parts["pp"].get_group())
        return total.item()

    def of_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of all stages of the pipeline, by name."""
        if not self.stages:
            return own
        found: list[Any] = [None] * self._parts["pp"].size()
        on_cpu = {name: t.detach().cpu() for name, t in own.items()}
        dist.all_gather_object(found, on_cpu, group=self._parts["pp"].get_group())
        return {name: t for one in found for name, t in one.items()}

    def join(self, routers: Routers, model: Any) -> None:
        """Makes the records of the last step those of all tokens and of all stages."""
        if self.group is not None:
            routers.sum(self.group)
        if self.stages and model.has_experts:
            routers.join(self._parts["pp"].get_group(), model.blocks_with_experts)

    def clip(self, model: Any, max_norm: float) -> None:
        """Limits the norm of the gradients of all stages together."""
        parameters: list[nn.Parameter] = list(model.parameters())
        if not self.stages:
            clip_gradients(parameters, max_norm)
            return
        repeated = {id(p) for p in model.repeated}
        gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in repeated]
        square = gradient_norm(gradients).double().square().item() if gradients else 0.0
        norm = torch.tensor(self.sum_of_stages(square)).sqrt()
        scale_gradients(parameters, max_norm, norm)

    def any(self, flag: bool) -> bool:
        """Returns True if the flag is True on any rank of the mesh."""
        if self.mesh is None:
            return flag
        total = torch.tensor(int(flag), device=self.mesh.device_type)
        dist.all_reduce(total)
        return bool(total)

    @property
    def _place(self) -> int:
        """Number of this rank among those that draw different random numbers."""
        return 0 if self._others is None else self._others.get_local_rank()

    def seed(self, seed: int, step: int = 0) -> None:
        """Seeds torch's generator differently on ranks with other tokens or layers."""
        if self._others is not None:
            torch.manual_seed((seed + 1 + self._place + self._others.size() * step) % 2**63)

    def random_states(self) -> dict[str, Tensor]:
        """Returns the states of the generators of all ranks, by their names in a checkpoint."""
        own = torch.get_rng_state()
        if self._others is None:
            return {"rng/cpu": own}
        states: list[Any] = [None] * self._others.size()
        dist.all_gather_object(states, own, group=self._others.get_group())
        return {f"rng/cpu{f'/{n}' if n else ''}": state for n, state in enumerate(states)}

    def set_random_state(self, states: Mapping[str, Tensor], seed: int, step: int) -> None:
        """Restores this rank's generator, or seeds it if the run had fewer ranks."""
        name = f"rng/cpu/{self._place}" if self._place else "rng/cpu"
        if name in states:
            torch.set_rng_state(states[name])
        else:
            self.seed(seed, step)

    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Loads whole weights, of which a stage of a pipeline takes its own."""
        own = model.state_dict()
        if self.stages:
            weights = {name: t for name, t in weights.items() if name in own}
        model.load_state_dict(
            {n: divided(t, own[n]) if n in own else t for n, t in weights.items()}
        )


def _placed(placement: Shard, parameter: nn.Parameter) -> Shard:
    return placement


def whole(t: Any) -> Any:
    """Returns all elements of a tensor that is divided among ranks (a DTensor), else t."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def divided(t: Tensor, like: Any) -> Tensor:
    """Returns this rank's part of t, which every rank has whole, if `like` is divided."""
    if not hasattr(like, "full_tensor") or t.shape != like.shape:
        return t
    from torch.distributed.tensor import distribute_tensor

    t = t.to(like.device)
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)
