"""Steps of the trainer on a pipeline of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from omniattn.training.tasks import Batch

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


class Pipeline:
    """Runs microbatches through this rank's stage and the others.

    Args:
        stage: of `pipeline_parallel`.
        count: number of microbatches of a step: 1F1B if the stages can all be busy, else GPipe.
    """

    def __init__(self, stage: PipelineStage, count: int) -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        from omniattn.distributed.pipeline import same_stage

        self.stage = stage
        kind = Schedule1F1B if count >= stage.num_stages else ScheduleGPipe
        self._training = kind(stage, count, loss_fn=_loss, scale_grads=False)
        self._held_out = ScheduleGPipe(same_stage(stage), 1)

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
        from torch.distributed.pipelining import ScheduleGPipe

        from omniattn.distributed.pipeline import same_stage

        # A stage of its own, since a schedule takes batches of one shape.
        own = self._run(ScheduleGPipe(same_stage(self.stage), 1), tokens)
        found = [own]
        group = self.stage.group
        assert group is not None
        last = dist.get_global_rank(group, self.stage.num_stages - 1)
        dist.broadcast_object_list(found, last, group=group, device=tokens.device)
        logits: Tensor = found[0].to(tokens.device)
        return logits

    def _run(
        self, schedule: Any, tokens: Tensor, targets: Tensor | None = None, **options: Any
    ) -> Any:
        first = (tokens,) if self.stage.is_first else ()
        others = {} if self.stage.is_first else {"tokens": tokens}
        try:
            return schedule.step(*first, **others, targets=targets, **options)
        except RuntimeError as error:
            # torch replaces errors of a forward by one that has shapes only.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output
