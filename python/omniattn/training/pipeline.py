"""Steps of the trainer on a pipeline of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from omniattn.checks.arguments import require_choice
from omniattn.training.tasks import Batch

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


#: Schedules of torch by their names there, for one and for several stages on each rank.
SCHEDULES = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
}


class Pipeline:
    """Runs microbatches through this rank's stages and those of others.

    Args:
        stages: of `pipeline_parallel`, one or several.
        count: number of microbatches of a step.
        schedule: name in SCHEDULES, from `chosen_schedule`.
    """

    def __init__(self, stages: list[PipelineStage], count: int, schedule: str) -> None:
        self.stages = stages
        options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        self._training = _schedule(schedule, stages, count, **options)
        self._held_out = self._forward_only()

    def _forward_only(self) -> Any:
        """Returns a schedule of whole batches; each schedule takes batches of one shape."""
        from omniattn.distributed.pipeline import same_stages

        several = len(self.stages) > 1
        return _schedule("LoopedBFS" if several else "GPipe", same_stages(self.stages), 1)

    def step(self, batch: Batch, shares: Tensor) -> float:
        """Adds the gradients of microbatches, which have these shares (count,) of the loss.

        Returns the sum of the losses times their shares at the last stage, 0 at the others.
        """
        losses: list[Tensor] = []
        self._run(
            self._training,
            *batch,
            share=shares,
            target=batch[-1],
            losses=losses,
            return_outputs=False,
        )
        return sum(loss.item() for loss in losses)

    def loss(self, batch: Batch) -> float:
        """Returns the loss of a batch at the last stage, 0 at the others."""
        found = self._run(self._held_out, *batch)
        return 0.0 if found is None else found.item()

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of tokens (B, T) on all ranks, which all call it, for metrics."""
        own = self._run(self._forward_only(), tokens)
        found = [own]
        group = self.stages[0].group
        assert group is not None
        last = dist.get_global_rank(group, self.stages[0].group_size - 1)
        dist.broadcast_object_list(found, last, group=group, device=tokens.device)
        logits: Tensor = found[0].to(tokens.device)
        return logits

    def _run(
        self, schedule: Any, tokens: Tensor, targets: Tensor | None = None, **options: Any
    ) -> Any:
        first = (tokens,) if self.stages[0].is_first else ()
        try:
            return schedule.step(*first, tokens=tokens, targets=targets, **options)
        except RuntimeError as error:
            # torch replaces errors of a forward by one that has shapes only.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output


def _schedule(name: str, stages: list[PipelineStage], count: int, **options: Any) -> Any:
    from torch.distributed import pipelining

    kind: Any = getattr(pipelining, SCHEDULES[name])
    return kind(stages if _takes_several(name) else stages[0], count, **options)


def _takes_several(name: str) -> bool:
    return name in ("LoopedBFS", "Interleaved1F1B")


def chosen_schedule(name: str | None, stages: int, count: int, ranks: int) -> str:
    """Returns the schedule for `count` microbatches with so many stages on each rank.

    It is the named one, or "Interleaved1F1B" with several stages on a rank, else "1F1B" if the
    ranks can all be busy, and "GPipe" if they cannot.

    Raises:
        ValueError: the schedule has no such number of microbatches or stages.
    """
    if name is None:
        name = "Interleaved1F1B" if stages > 1 else "1F1B" if count >= ranks else "GPipe"
    require_choice("Trainer", "pp_schedule", name, tuple(SCHEDULES))
    if stages > 1 and not _takes_several(name):
        raise ValueError(
            "Trainer: pp_schedule must be 'Interleaved1F1B' or 'LoopedBFS' with several stages on "
            f"a rank, got pp_schedule={name!r}, stages_per_rank={stages}"
        )
    if name == "1F1B" and count < ranks:
        raise ValueError(
            "Trainer: accumulate must be at least the ranks of pp with pp_schedule='1F1B', "
            f"got accumulate={count}, pp={ranks}"
        )
    if name == "Interleaved1F1B" and count % max(1, count // ranks):
        raise ValueError(
            "Trainer: accumulate must be a multiple of accumulate // pp with "
            f"pp_schedule='Interleaved1F1B', got accumulate={count}, pp={ranks}"
        )
    return name
