"""Accuracies of recall tasks, by mixer and by share of attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from omniattn.compare.budget import Sized
from omniattn.compare.cells import Cell, Result, described
from omniattn.compare.losses import warmup_of
from omniattn.compare.recall import Needle, RecallTask, right
from omniattn.compare.settings import Settings
from omniattn.training import TrainConfig, Trainer

#: Evaluations of a run; it ends early once `_ENOUGH` of the answers are right.
_POINTS, _ENOUGH = 10, 0.995
#: Sequences per step, relative to those of text, which are longer.
_MORE = 2
#: Examples of the last test, per distance of a needle.
_TESTED, _PER_DISTANCE = 512, 64
#: Number of distances of a needle.
_DISTANCES = 8


def cells(models: Sequence[tuple[RecallTask, Sized]], settings: Settings) -> Iterator[Cell]:
    """Yields a run for each task, model and seed."""
    for task, model in models:
        for seed in settings.seeds:
            given: Result = {"model": described(model.config), "version": model.version}
            given |= {"steps": settings.recall_steps, "batch": _MORE * settings.batch}
            given |= {"lr": settings.lr, "data": task.digest}

            def compute(task: RecallTask = task, model: Sized = model, seed: int = seed) -> Result:
                return _train(task, model, settings, seed)

            yield Cell("recall", model.name, task.name, seed, given, compute)


def _train(task: RecallTask, model: Sized, settings: Settings, seed: int) -> Result:
    steps = settings.recall_steps
    config = TrainConfig(
        model=model.config,
        steps=steps,
        batch=_MORE * settings.batch,
        length=task.items_per_example,
        seed=seed,
        lr=settings.lr,
        min_lr=settings.lr / 10,
        warmup=warmup_of(steps),
        weight_decay=0.0,
    )
    trainer = Trainer(config, task)
    for step in range(1, steps + 1):
        trainer.train_step()
        if step % max(1, steps // _POINTS) == 0:
            trainer.evaluate()
            if trainer.held_out[-1]["accuracy"] >= _ENOUGH:
                break
    with torch.no_grad():
        trainer.model.eval()
        accuracy = float(right(trainer.model, task.held_out_batch(_TESTED)).double().mean())
        result: Result = {"accuracy": accuracy, "steps": trainer.step, "chance": task.chance}
        if isinstance(task, Needle):
            result["distances"] = _by_distance(trainer, task)
    return result


def _by_distance(trainer: Trainer, task: Needle) -> list[list[float]]:
    """Returns pairs of the tokens between needle and question, and the accuracy."""
    length = task.items_per_example
    found = []
    for place in torch.linspace(length - 3, 0, min(_DISTANCES, length - 2)).round().int().tolist():
        generator = torch.Generator().manual_seed(place)
        batch = task.at(torch.full((_PER_DISTANCE,), place), generator)
        accuracy = float(right(trainer.model, batch).double().mean())
        found.append([length - 3 - place, accuracy])
    return found
