"""Training state of a model's routers: losses, bias updates and expert loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.modules import MoE, RouterState


class Routers:
    """Manages the MoE layers of a model; has no effect on models without any.

    Args:
        model: model whose MoE layers have equally many experts.
        sum_layers: True if `loss` is the sum over layers, False for the mean.

    Attributes:
        loads: for each step, assignments (layers, E) int64 before dropping, on the CPU.
        dropped: for each step, assignments over capacity, (layers,) int64.
        losses: for each step, the value of `loss`.
    """

    def __init__(self, model: nn.Module, *, sum_layers: bool = False) -> None:
        self.sum_layers = sum_layers
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        self.loads: list[Tensor] = []
        self.dropped: list[Tensor] = []
        self.losses: list[float] = []
        self._parts: list[tuple[Tensor, Tensor, float]] = []  # of a step that is not finished

    def _states(self) -> list[RouterState]:
        return [layer.state for layer in self.layers if layer.state is not None]

    def loss(self) -> Tensor | float:
        """Returns the mean or sum over layers of the last forward's balance and z-losses."""
        losses = [state.balance_loss + state.z_loss for state in self._states()]
        if not losses:
            return 0.0
        return torch.stack(losses).sum() if self.sum_layers else torch.stack(losses).mean()

    def balance_over(
        self,
        group: torch.distributed.ProcessGroup | None,
        sequences: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Calls :meth:`omniattn.modules.MoE.balance_over` of all layers."""
        for layer in self.layers:
            layer.balance_over(group, sequences)

    @torch.no_grad()
    def step(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Updates biases and default vectors after a training step, and records this rank's load.

        The biases depend on the counts of all ranks of `group`, and of all forwards since the last
        step for which `add` was called; without such a call, of the last forward. Default vectors
        follow the last forward.
        """
        if not self.layers:
            return
        if not self._parts:
            self.add()
        counts = torch.stack([part[0] for part in self._parts]).sum(0)
        for layer, count in zip(self.layers, counts, strict=True):
            if layer.config.gate.router == "sigmoid":
                layer.update_bias(group=group, counts=count)
            if layer.config.gate.router_grad == "default_vector":
                layer.update_default_vectors()
        self.loads.append(counts.cpu())
        self.dropped.append(torch.stack([part[1] for part in self._parts]).sum(0).cpu())
        self.losses.append(sum(part[2] for part in self._parts))
        self._parts = []

    @torch.no_grad()
    def add(self, share: float = 1.0, ran: nn.Module | None = None) -> None:
        """Counts the last forward as a part of the next step, with this share of its loss.

        Gradient accumulation calls it after each forward; `ran` is the module that was called,
        None for the whole model.
        """
        own = None if ran is None else {id(module) for module in ran.modules()}
        states = [None if own and id(n) not in own else n.state for n in self.layers]
        found = [state for state in states if state is not None]
        if not found:
            return
        none = torch.zeros_like(found[0].counts), torch.zeros_like(found[0].dropped)
        rows = [none if s is None else (s.counts, s.dropped) for s in states]
        counts, dropped = (torch.stack(each) for each in zip(*rows, strict=True))
        losses = sum(float(state.balance_loss + state.z_loss) for state in found)
        share = share if self.sum_layers else share / len(self.layers)
        self._parts.append((counts, dropped, share * losses))

    def discard(self, kept: int = 0) -> None:
        """Forgets the forwards since the last step but the last `kept`, as after a failed one."""
        self._parts = self._parts[len(self._parts) - kept :]

    def _popped(self, group: torch.distributed.ProcessGroup) -> Iterator[tuple[Any, ...]]:
        """Removes the records of the last step, and returns loads, dropped and losses of the ranks
        of `group` that have layers."""
        own = (self.loads.pop(), self.dropped.pop(), self.losses.pop()) if self.layers else None
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, own, group=group)
        return zip(*filter(None, found), strict=True)

    def sum(self, group: torch.distributed.ProcessGroup) -> None:
        """Makes the records of the last step their sums over the ranks of `group`, which have the
        same layers and shares of the loss that add up to 1, as passed to `add`."""
        if self.layers:
            loads, dropped, losses = self._popped(group)
            self.loads.append(torch.stack(loads).sum(0))
            self.dropped.append(torch.stack(dropped).sum(0))
            self.losses.append(sum(losses))

    def join(self, group: torch.distributed.ProcessGroup, places: list[int]) -> None:
        """Makes the records of the last step those of the layers of all ranks of `group`, which
        have stages of a pipeline; `places` orders the layers of this rank among all."""
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, places, group=group)
        order = torch.tensor([place for one in found for place in one]).argsort(stable=True)
        loads, dropped, losses = self._popped(group)
        self.loads.append(torch.cat(loads)[order])
        self.dropped.append(torch.cat(dropped)[order])
        shares = [1.0 if self.sum_layers else len(n) / len(self.loads[-1]) for n in loads]
        self.losses.append(sum(a * b for a, b in zip(losses, shares, strict=True)))

    def status(self) -> str:
        """Describes the last step: relative load of the busiest expert, and share dropped."""
        if not self.loads:
            return ""
        load, dropped = self.loads[-1], self.dropped[-1]
        busiest = float((load.amax(-1) / load.double().mean(-1)).max())
        share = float(dropped.sum() / load.sum())
        return f"busiest expert {busiest:.2f}x, dropped {share:.1%}, aux {self.losses[-1]:.4f}"

    def history(self) -> dict[str, Tensor]:
        """Returns the records for a checkpoint, as accepted by `restore`."""
        if not self.loads:
            return {}
        return {
            "loads": torch.stack(self.loads),
            "dropped": torch.stack(self.dropped),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }

    def restore(self, history: dict[str, Tensor]) -> None:
        """Restores the records of an earlier run."""
        if history:
            self.loads, self.dropped = list(history["loads"]), list(history["dropped"])
            self.losses = history["losses"].tolist()
