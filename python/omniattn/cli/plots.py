"""Plots of a training run."""

from __future__ import annotations

from pathlib import Path

import torch

from omniattn.figures import new_figure, save_figure
from omniattn.training import Trainer


def plot_losses(trainer: Trainer, reference: Trainer | None, path: Path) -> None:
    """Plots the training, held-out and reference losses and the metrics over steps."""
    figure = new_figure(figsize=(8, 5))
    axes = figure.subplots()
    axes.plot(trainer.losses, lw=1, color="tab:blue", label="training")
    points = [(point["step"], point["loss"]) for point in trainer.held_out]
    axes.plot(*zip(*points, strict=True), "o-", color="tab:orange", label="held out")
    if reference is not None:
        axes.plot(
            reference.losses, "--", lw=2, color="black", label="training, plain-torch reference"
        )
    c = trainer.config
    axes.set_title(
        f"{c.model}, {trainer.model.config.num_parameters:,} parameters, {c.dtype} "
        f"on {trainer.device}"
    )
    axes.set_xlabel(f"step of {c.batch * trainer.task.items_per_example:,} {trainer.task.items}")
    axes.set_ylabel(f"loss ({trainer.task.unit})")
    axes.grid(alpha=0.3)
    names = [name for name in trainer.held_out[-1] if name not in ("step", "loss")]
    if names:
        shares = axes.twinx()
        for name in names:
            steps = [point for point in trainer.held_out if name in point]
            line = [(point["step"], 100 * point[name]) for point in steps]
            shares.plot(*zip(*line, strict=True), "s:", ms=4, label=name)
        shares.set(ylabel="held out, in percent", ylim=(0, 105))
        shares.legend(loc="center right")
    axes.legend(loc="upper right")
    save_figure(figure, path)


def plot_load(trainer: Trainer, path: Path) -> None:
    """Plots the relative load of the experts over steps, one plot per layer; 1 is balanced."""
    loads = torch.stack(trainer.routers.loads).double().permute(1, 2, 0)
    relative = (loads / loads.mean(1, keepdim=True)).numpy()  # (layers, experts, steps)
    layers = len(relative)
    figure = new_figure(figsize=(8, 2 + 1.4 * layers))
    *pictures, axes = figure.subplots(layers + 1, sharex=True)
    for layer, picture in enumerate(pictures):
        shown = picture.imshow(
            relative[layer], aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, origin="lower"
        )
        picture.set_ylabel(f"layer {layer}\nexpert")
        axes.plot(relative[layer].max(0), lw=1, label=f"layer {layer}")
    figure.colorbar(shown, ax=pictures, label="load (1: even)")
    axes.set(xlabel="step", ylabel="busiest expert")
    axes.legend(ncols=4, fontsize="small")
    axes.grid(alpha=0.3)
    pictures[0].set_title(f"{trainer.config.model}: load of the experts of each MoE layer")
    save_figure(figure, path)
