"""omniattn train: runs the Trainer, with files, progress and a comparison with the reference."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from omniattn.cli.arguments import TIMEOUT
from omniattn.cli.config_file import read_config
from omniattn.cli.device import require_device
from omniattn.cli.errors import CommandError, require, writing
from omniattn.cli.plots import plot_load, plot_losses
from omniattn.cli.processes import from_first, launcher, on_mesh
from omniattn.models import CheckpointError, ModelConfig
from omniattn.training import TrainConfig, Trainer, recipe_of, saved_config, task_of
from omniattn.training.ranks import DIMENSIONS

_RUNS = Path("runs")
#: Out-of-memory messages of torch's CPU allocator, from torch's ops and from this package's.
_NO_MEMORY = ("can't allocate memory", "aoti_torch_empty_strided")
_INTERRUPTED = 130  # a shell's exit code for SIGINT
# Shorter measurements are noise: on two cores shared with eight other jobs, the ratio of median
# step times varied by a factor of 6 for 0.15 s and 20 steps, 4 for 0.8 s, but 1.9 for 2.4 s.
_TIMED_STEPS, _TIMED_SECONDS = 10, 2.0


def run(args: argparse.Namespace) -> int:
    """Trains, compares, plots and samples; returns the exit code."""
    require("tqdm", "matplotlib", "safetensors")
    with on_mesh(args) as mesh:
        return _run(args, mesh)


def _run(args: argparse.Namespace, mesh: DeviceMesh | None) -> int:
    trainer, checkpoint = _prepare(args, mesh)
    c = trainer.config
    print(
        f"{c.model_name}: {trainer.model.config.num_parameters:,} parameters, {c.dtype}, "
        f"{trainer.device}{_ranks(args)}, threads: {torch.get_num_threads()}; "
        f"{trainer.task.summary}; "
        f"output in {checkpoint.parent}",
        flush=True,
    )
    with _memory(c):
        finished = _train(trainer, checkpoint)
    if not finished:
        print(
            f"interrupted at step {trainer.step} of {c.steps}; nothing is lost, continue with: "
            f"{launcher(args)} -m omniattn train --resume {_again(args, checkpoint.parent)}"
        )
        return _INTERRUPTED
    model = trainer.whole_model()
    if not trainer.ranks.is_first:
        return 0
    loss = trainer.held_out[-1]["loss"]
    print(
        f"held-out loss {loss:.4f} {trainer.task.unit} after {c.steps} steps",
        *_metrics(trainer),
        *([_speed(trainer)] if trainer.seconds else []),
        sep=", ",
    )
    with _memory(c):
        reference = _compare(trainer, min(args.compare, c.steps)) if args.compare else None
    with writing(checkpoint.parent):
        plot_losses(trainer, reference, checkpoint.parent / "loss.png")
        if trainer.routers.loads:
            plot_load(trainer, checkpoint.parent / "load.png")
        sample = trainer.task.sample(model, c.seed)
        if sample is not None:
            (checkpoint.parent / "sample.txt").write_text(sample, encoding="utf-8")
    if sample is not None:
        lines = ("".join(c if c.isprintable() else " " for c in s) for s in sample.splitlines())
        print("sample:", *islice(lines, 12), sep="\n  | ")
    print(f"wrote {', '.join(sorted(f.name for f in checkpoint.parent.iterdir()))}")
    return 0


def _ranks(args: argparse.Namespace) -> str:
    """Describes the mesh, if there is one."""
    sizes = {name: getattr(args, name) for name in DIMENSIONS}
    return "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)


def _again(args: argparse.Namespace, out: Path) -> str:
    """Returns the options to continue a run: its folder and options not in the checkpoint."""
    options = ["--out", str(out)]
    for name in DIMENSIONS:
        if (size := getattr(args, name)) > 1:
            options += [f"--{name}", str(size)]
    if args.timeout != TIMEOUT:
        options += ["--timeout", str(args.timeout)]
    if args.config is not None:
        options += ["--config", ":".join(map(str, args.config))]
    if args.device != "cpu":
        options += ["--device", args.device]
    if args.backend is not None:
        options += ["--backend", args.backend]
    return shlex.join(options)


@contextmanager
def _memory(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(text in str(error) for text in _NO_MEMORY):
            raise
        raise CommandError(
            f"not enough memory for --batch {config.batch} and --length {config.length}; "
            "take smaller ones"
        ) from error


def _output_folder(args: argparse.Namespace) -> Path:
    if args.out is not None:
        out: Path = args.out
        with writing(out):
            occupied = (out / "checkpoint.safetensors").exists()
        if occupied and not args.resume:
            raise CommandError(f"{out} holds a run already; add --resume or give another --out")
        return out
    numbers = [int(f.name[6:]) for f in _RUNS.glob("train-*") if f.name[6:].isdecimal()]
    last = max(numbers, default=0)
    if args.resume and last == 0:
        raise CommandError(f"there is no run in {_RUNS.absolute()} to resume; give its --out")
    return _RUNS / f"train-{last if args.resume else last + 1}"


def _start(args: argparse.Namespace) -> TrainConfig:
    """Returns the config that the options override."""
    if args.config is None:
        config = TrainConfig() if args.model is None else TrainConfig(model=args.model)
    elif args.model is not None:
        raise CommandError("--config and --model both select a model; give one of them")
    else:
        found = read_config(*args.config)
        if isinstance(found, TrainConfig):
            return found
        config = TrainConfig(model=found)
    try:
        return replace(config, **recipe_of(config.model_config).options)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _portable(model: str | ModelConfig) -> str | ModelConfig:
    """Returns a model config in the form stored in checkpoints."""
    return model if isinstance(model, str) else replace(model, backend=None)


def _config(args: argparse.Namespace, start: TrainConfig, saved: TrainConfig | None) -> TrainConfig:
    """Returns the saved run's config, or `start`, with the given options."""
    given = {
        f.name: getattr(args, f.name)
        for f in fields(TrainConfig)
        if getattr(args, f.name, None) is not None
    }
    if args.data is not None:
        given["data"] = str(args.data.absolute())
    if saved is None:
        return replace(start, **given)
    if args.config is not None:  # other fields come from the saved run
        if _portable(start.model) != saved.model:
            raise CommandError("--config must have the model of the run to resume")
        saved = replace(saved, model=start.model)
    saved = replace(saved, data=given.pop("data", saved.data))  # Trainer.load compares the content
    steps = given.pop("steps", saved.steps)
    if steps < saved.steps:
        raise CommandError(
            f"--steps must be at least that of the run to resume, got {steps}, "
            f"the run has {saved.steps}"
        )
    for name, value in given.items():
        if value != getattr(saved, name):
            raise CommandError(
                f"--{name} must be that of the run to resume, "
                f"got {value}, the run has {getattr(saved, name)}"
            )
    # The learning rate schedule keeps its old end, since the finished steps followed it.
    end = saved.steps if saved.decay_steps is None else saved.decay_steps
    return saved if steps == saved.steps else replace(saved, steps=steps, decay_steps=end)


def _prepare(args: argparse.Namespace, mesh: DeviceMesh | None) -> tuple[Trainer, Path]:
    checkpoint = from_first(mesh, lambda: _output_folder(args)) / "checkpoint.safetensors"
    start = _start(args)  # first, since the file may define layers of the saved run
    try:
        saved = saved_config(checkpoint) if args.resume else None
    except OSError as error:
        raise CommandError(f"cannot read {checkpoint}: {error.strerror or error}") from error
    except ValueError as error:  # damaged, or with layers that no loaded module defines
        raise CommandError(str(error)) from error
    config = _config(args, start, saved)

    model, name = config.model_config, config.model_name
    try:
        kind = task_of(model, config.task)
    except ValueError as error:
        raise CommandError(str(error)) from error
    reads_text = kind.items == "tokens"
    if args.length is not None and not reads_text:
        raise CommandError(f"{name} trains on images, which have no --length")
    if reads_text and model.longest is not None and config.length > model.longest:
        raise CommandError(
            f"{name} has positions for {model.longest} tokens, got --length {config.length}"
        )
    source = config.data or "default data"
    try:
        task = kind.load(Path(config.data) if config.data else None, config.length)
    except OSError as error:
        moved = "; give the new path of the run's data with --data" if args.resume else ""
        raise CommandError(f"cannot read {source}: {error.strerror or error}{moved}") from error
    except (ImportError, ValueError) as error:
        raise CommandError(f"{source}: {error}") from error

    require_device(args.device, args.backend)
    try:
        trainer = Trainer(
            config,
            task,
            device=args.device,
            backend=args.backend,
            mesh=mesh,
            pp_schedule=args.pp_schedule,
            stages_per_rank=args.stages_per_rank,
        )
    except (ImportError, NotImplementedError, ValueError) as error:  # augmentations, meshes
        raise CommandError(str(error)) from error
    with writing(checkpoint.parent):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        probe = checkpoint.with_name(f".probe-{os.getpid()}")
        probe.touch()
        probe.unlink()
    if args.resume:
        try:
            trainer.load(checkpoint)
        except CheckpointError as error:
            raise CommandError(str(error)) from error
    return trainer, checkpoint


@contextmanager
def _until_interrupted() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the yielded list; a second signal acts immediately."""
    caught: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, previous[number])

    previous: dict[int, Any] = {
        n: signal.signal(n, remember) for n in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _train(trainer: Trainer, checkpoint: Path) -> bool:
    """Runs the remaining steps; returns False if interrupted. Saves the checkpoint either way."""
    from tqdm import tqdm

    c = trainer.config
    every = max(1, c.steps // 10)

    def save() -> None:
        try:
            trainer.save(checkpoint)
        except OSError as error:
            kept = "that of an earlier step is intact" if checkpoint.exists() else "none yet"
            raise CommandError(
                f"cannot write {checkpoint} at step {trainer.step}: "
                f"{error.strerror or error} (checkpoint: {kept})"
            ) from error

    with (
        _until_interrupted() as caught,
        # disable=None: no bar if stdout is not a terminal; each evaluation prints a line instead
        tqdm(
            total=c.steps, initial=trainer.step, unit="step", file=sys.stdout, disable=None
        ) as bar,
    ):
        if not trainer.held_out:
            trainer.evaluate()
        while trainer.step < c.steps:
            try:
                loss = trainer.train_step()
            except FloatingPointError as error:
                raise CommandError(f"{error}; try a smaller model or --dtype float32") from error
            except NotImplementedError as error:
                if trainer.ranks.mesh is None:
                    raise
                raise CommandError(str(error)) from error  # a layer that has no such division
            evaluated = trainer.step % every == 0 or trainer.step == c.steps
            if evaluated:
                trainer.evaluate()
                save()
            parts = (
                f"loss {loss:.3f}",
                f"held out {trainer.held_out[-1]['loss']:.3f}",
                *_metrics(trainer),
                *(f"{name} {values[-1]:.3f}" for name, values in trainer.further.items()),
                trainer.routers.status(),
                _speed(trainer),
            )
            status = ", ".join(filter(None, parts))
            bar.set_postfix_str(status, refresh=False)
            bar.update()
            if bar.disable and evaluated:
                print(f"step {trainer.step}/{c.steps}: {status}", flush=True)
            # Signals reach the ranks at different steps.
            if trainer.ranks.any(bool(caught)) and trainer.step < c.steps:
                save()
                return False
    return True


def _metrics(trainer: Trainer) -> list[str]:
    """Formats the last validation metrics, without the loss."""
    point = trainer.held_out[-1].items()
    return [f"{name} {value:.1%}" for name, value in point if name not in ("step", "loss")]


def _speed(trainer: Trainer) -> str:
    return f"{trainer.items_per_second:,.0f} {trainer.task.items}/s"


def _compare(trainer: Trainer, steps: int) -> Trainer:
    """Trains the same model from the same seed with the reference; prints the comparison."""
    from tqdm import trange

    reference = Trainer(trainer.config, trainer.task, device=trainer.device, backend="reference")
    for _ in trange(steps, desc="reference", unit="step", file=sys.stdout, disable=None):
        reference.train_step()
    pairs = zip(trainer.losses[:steps], reference.losses, strict=True)
    differences = [abs(a - b) for a, b in pairs]
    print(
        f"reference: largest difference in loss {max(differences):.1e} over {steps} steps, "
        f"{differences[0]:.1e} in the first (training makes rounding errors grow); "
        f"{_speed_up(trainer, reference)}"
    )
    return reference


def _speed_up(trainer: Trainer, reference: Trainer) -> str:
    """Describes the speed-up, or why it was not measured."""
    for name, side in (("training", trainer), ("the reference", reference)):
        steps, seconds = len(side.seconds), sum(side.seconds)
        if steps < _TIMED_STEPS or seconds < _TIMED_SECONDS:
            return (
                f"speed-up not measured: that needs {_TIMED_STEPS} steps and "
                f"{_TIMED_SECONDS:.0f} s on both sides, but {name} ran {steps} steps in "
                f"{seconds:.1f} s"
            )
    ratio = trainer.items_per_second / reference.items_per_second
    return f"{_speed(reference)}, speed-up {ratio:.1f}x"
