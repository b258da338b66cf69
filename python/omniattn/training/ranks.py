"""The ranks of a training run: how model, batches and tokens are divided among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omniattn.models.decoders.decoder import Decoder
from omniattn.training.tasks import Batch, targets_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# DTensor, fully_shard and what stands on them are imported by runs on a mesh only: 1 s.

T = TypeVar("T")

#: Dimensions of a mesh: parts of the batch, of the tokens, and of heads and hidden channels.
DIMENSIONS = ("dp", "cp", "tp")


class Ranks:
    """Divides a run among the ranks of a mesh, so that its steps are those of one process.

    "dp" and "cp" ranks have parts of the batch and of its tokens, and share the parameters by
    `fully_shard`; "tp" is `tensor_parallel`.

    Args:
        mesh: mesh with some of DIMENSIONS, in this order; None for one process.

    Attributes:
        replicas, replica: number of parts of a batch, and the number of this rank's.
        averaged: number of ranks over whose losses gradients are averaged.
        group: process group of these ranks, None for one.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or names != tuple(n for n in DIMENSIONS if n in names)):
            raise ValueError(
                f"Trainer: mesh must have dimensions named {', '.join(DIMENSIONS)}, or some of "
                f"them in this order, got mesh={mesh}"
            )
        self.mesh = mesh
        self._parts = {name: mesh[name] for name in names} if mesh is not None else {}
        dp = self._parts.get("dp")
        self.replicas, self.replica = (1, 0) if dp is None else (dp.size(), dp.get_local_rank())
        shared = tuple(name for name in ("dp", "cp") if name in names)
        self.data: DeviceMesh | None = None
        if mesh is not None and shared:
            self.data = mesh[shared]._flatten("data") if len(shared) > 1 else mesh[shared[0]]
        self.averaged = 1 if self.data is None else self.data.size()
        self.group = None if self.data is None else self.data.get_group()
        self.is_first = mesh is None or dist.get_rank() == 0

    def require_batch(self, batch: int, accumulate: int, length: int) -> None:
        """Requires examples for each part of a batch, and as many tokens for each rank of cp."""
        if self.mesh is not None and batch < accumulate * self.replicas:
            raise ValueError(
                "Trainer: batch must be at least accumulate times the ranks of dp, "
                f"got batch={batch}, accumulate={accumulate}, dp={self.replicas}"
            )
        cp = self._parts.get("cp")
        if cp is not None and length % (2 * cp.size()):
            raise ValueError(
                "Trainer: length must be a multiple of twice the ranks of cp, "
                f"got length={length}, cp={cp.size()}"
            )

    def split(self, model: nn.Module) -> None:
        """Divides a model's parameters among the ranks.

        Raises:
            ValueError, NotImplementedError: the model has no such division.
        """
        if self.mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        from omniattn.distributed import tensor_parallel

        if not isinstance(model, Decoder):
            raise NotImplementedError(
                f"Trainer: mesh must be None except for decoders, got {type(model).__name__}"
            )
        if "tp" in self._parts:
            tensor_parallel(model, self._parts["tp"])
        if self.data is not None:
            for block in model.layers:
                fully_shard(block, mesh=self.data)
            fully_shard(model, mesh=self.data)

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

    def sum(self, value: float) -> float:
        """Returns the sum of a number over the ranks with different tokens."""
        if self.group is None:
            return value
        assert self.mesh is not None
        total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total, group=self.group)
        return total.item()

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
        return 0 if self.data is None else self.data.get_local_rank()

    def seed(self, seed: int, step: int = 0) -> None:
        """Seeds torch's generator differently on ranks that have different tokens."""
        if self.data is not None:
            torch.manual_seed((seed + 1 + self._place + self.averaged * step) % 2**63)

    def random_states(self) -> dict[str, Tensor]:
        """Returns the states of the generators of all ranks, by their names in a checkpoint."""
        own = torch.get_rng_state()
        if self.data is None:
            return {"rng/cpu": own}
        states: list[Any] = [None] * self.averaged
        dist.all_gather_object(states, own, group=self.group)
        return {f"rng/cpu{f'/{n}' if n else ''}": state for n, state in enumerate(states)}

    def set_random_state(self, states: Mapping[str, Tensor], seed: int, step: int) -> None:
        """Restores this rank's generator, or seeds it if the run had fewer ranks."""
        name = f"rng/cpu/{self._place}" if self._place else "rng/cpu"
        if name in states:
            torch.set_rng_state(states[name])
        else:
            self.seed(seed, step)

    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Loads whole weights."""
        own = model.state_dict()
        model.load_state_dict(
            {n: divided(t, own[n]) if n in own else t for n, t in weights.items()}
        )


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
