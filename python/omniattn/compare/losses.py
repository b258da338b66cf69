"""Losses of text against steps, time and operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omniattn.compare.budget import Sized
from omniattn.compare.cells import Cell, Result, described
from omniattn.compare.settings import Settings
from omniattn.models import ModelConfig
from omniattn.training import TextTask, TrainConfig, Trainer

#: Number of held-out losses of a run.
_POINTS = 10


def train_config(
    config: ModelConfig, settings: Settings, seed: int, *, steps: int, length: int, warmup: int
) -> TrainConfig:
    """Returns the options of a run; all runs of a comparison share them."""
    return TrainConfig(
        model=config,
        steps=steps,
        batch=settings.batch,
        length=length,
        seed=seed,
        lr=settings.lr,
        min_lr=settings.lr / 10,
        warmup=warmup,
    )


def warmup_of(steps: int) -> int:
    """Returns the steps of warm-up: a tenth of a run, at most 20."""
    return min(20, max(1, steps // 10))


def trained_for(settings: Settings, task: TextTask) -> Result:
    """Returns the settings that all cells of text share."""
    return {"batch": settings.batch, "length": settings.length, "lr": settings.lr} | {
        "data": task.digest
    }


def cells(models: Sequence[Sized], settings: Settings, task: TextTask) -> Iterator[Cell]:
    """Yields a run for each model and seed."""
    for model in models:
        for seed in settings.seeds:
            given = trained_for(settings, task) | {"steps": settings.steps}
            given |= {"model": described(model.config), "version": model.version}

            def compute(model: Sized = model, seed: int = seed) -> Result:
                return _train(model, settings, task, seed)

            yield Cell("loss", model.name, "", seed, given, compute)


def _train(model: Sized, settings: Settings, task: TextTask, seed: int) -> Result:
    steps = settings.steps
    config = train_config(
        model.config, settings, seed, steps=steps, length=settings.length, warmup=warmup_of(steps)
    )
    trainer = Trainer(config, task)
    trainer.evaluate()
    for step in range(1, steps + 1):
        trainer.train_step()
        if step == steps or step % max(1, steps // _POINTS) == 0:
            trainer.evaluate()
    tokens = settings.batch * settings.length
    return {
        "losses": trainer.losses,
        "held_out": [[point["step"], point["loss"]] for point in trainer.held_out],
        "seconds": trainer.seconds,
        "tokens_per_second": trainer.items_per_second,
        "parameters": model.parameters,
        "flops_per_step": model.flops * tokens,
    }
