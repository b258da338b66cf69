"""Trains a model with AdamW, warm-up, cosine decay and clipping; resumes bit for bit."""

import json
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import omniattn
from omniattn.checks.arguments import require_choice, require_int, shown
from omniattn.models.checkpoint import (
    CheckpointError,
    config_of,
    model_metadata,
    read_checkpoint,
    write_checkpoint,
)
from omniattn.models.model import Model, ModelConfig
from omniattn.models.presets import PRESETS
from omniattn.models.routers import Routers
from omniattn.modules.base.fields import Fields, Limit, SignedInt, Size
from omniattn.modules.base.layer import check_fields
from omniattn.suggestions import did_you_mean
from omniattn.training.augment import Augment
from omniattn.training.optimizer import clip_gradients, parameter_groups, warmup_cosine
from omniattn.training.pipeline import Pipeline
from omniattn.training.ranks import Ranks, divided, whole
from omniattn.training.recipes import TASKS
from omniattn.training.recompute import recompute_blocks
from omniattn.training.tasks import Batch, Digits, Task, targets_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOSS = "loss"  # the model's own among all losses

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig(Fields):
    """Options that, with the content of the data, determine a training run.

    Args:
        model: a name in PRESETS, or the config of a model.
        steps, batch, length: optimizer steps; examples per step; tokens per example of text.
        dtype: "float32", or "bfloat16" for autocast with fp32 weights.
        seed: seed of the weights and of the batches.
        lr, min_lr, warmup: peak and final learning rate; steps of linear warm-up.
        decay_steps: step at which the final learning rate is reached; None: the last.
        betas, eps, weight_decay: options of AdamW.
        clip: maximum norm of the gradient, which may be infinite.
        clip_each: True to limit the norm of each parameter's gradient instead of the whole (DINO).
        augment: "mixup", "cutmix" and "randaugment" of torchvision, for classes of images.
        accumulate: parts of a batch that run one after another and make one step; the gradient is
            that of the whole batch, except for losses of routers, which see the parts, on all ranks
            of a mesh.
        recompute: keep only the input of each block for the backward, see `recompute_blocks`.
        data: path of a file or folder; None: data found on every machine.
        task: "instructions" for answers to the prompts of a file; None: task of the architecture.
    """

    model: str | ModelConfig = "llama"
    steps: int = 200
    batch: Size = 8
    length: Size = 256
    dtype: str = "float32"
    seed: SignedInt = 0
    lr: float = 2e-3
    min_lr: float = 2e-4
    warmup: int = 20
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: Limit = 1.0
    clip_each: bool = False
    augment: tuple[str, ...] = ()
    accumulate: Size = 1
    recompute: bool = False
    data: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelConfig) and self.model not in tuple(PRESETS):
            raise ValueError(
                "TrainConfig: model must be a name in PRESETS or the config of a model, "
                f"got model={shown(self.model)}{did_you_mean(self.model, PRESETS)}"
            )
        check_fields(self)
        if self.task is not None:
            require_choice("TrainConfig", "task", self.task, tuple(TASKS))
        require_choice("TrainConfig", "dtype", self.dtype, tuple(DTYPES))
        if self.accumulate > self.batch:
            raise ValueError(
                "TrainConfig: accumulate must be at most batch, "
                f"got accumulate={self.accumulate}, batch={self.batch}"
            )

    @property
    def model_config(self) -> ModelConfig:
        """Config of the model."""
        return PRESETS[self.model] if isinstance(self.model, str) else self.model

    @property
    def model_name(self) -> str:
        """Name of the preset or of the config's class."""
        return self.model if isinstance(self.model, str) else type(self.model).__qualname__


def learning_rate(step: int, config: TrainConfig) -> float:
    """Returns :func:`warmup_cosine` of a run at a step."""
    end = config.steps if config.decay_steps is None else config.decay_steps
    return warmup_cosine(step, lr=config.lr, min_lr=config.min_lr, warmup=config.warmup, steps=end)


def _same_on_all_ranks(config: TrainConfig, task: Task) -> dict[str, Any]:
    """Returns the values by which the ranks of a mesh must agree, by name."""
    model = config.model_config
    values = {"model": type(model).__qualname__, "data": task.digest}
    for f in fields(config):
        if f.name not in ("model", "data"):
            values[f"config.{f.name}"] = getattr(config, f.name)
    values |= {f"model.{f.name}": getattr(model, f.name) for f in fields(model)}
    return values | {"omniattn": omniattn.__version__, "torch": torch.__version__}


def loss_of(found: torch.Tensor | tuple[torch.Tensor, Any]) -> torch.Tensor:
    """Returns the loss of a model's result, which is the loss or (loss, outputs)."""
    return found[0] if isinstance(found, tuple) else found


class Trainer:
    """Training run: model, optimizer, step and history.

    A step depends only on this state and the data, so a run that is saved, loaded and continued
    gives the same bits as an uninterrupted one.

    Args:
        config: options of the run.
        task: task of the model, with its data.
        device: device of the model and the batches.
        backend: backend of all ops, e.g. "reference".
        mesh: ranks of the run, with dimensions among "pp", "dp", "fsdp", "cp", "ep" and "tp", in
            this order: layers, batches (also by "ep"), tokens, experts and heads are divided among
            them, and the steps are those of one process. None for one process. With "pp" the parts
            of a batch, of which there are `accumulate`, are the microbatches of a pipeline.
        pp_schedule: schedule of the pipeline: "GPipe", "1F1B" or, for several stages on each rank,
            "LoopedBFS" or "Interleaved1F1B". None for "Interleaved1F1B" with several stages, else
            "1F1B", or "GPipe" if there are fewer microbatches than ranks.
        stages_per_rank: number of stages of each rank of "pp".
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        *,
        device: torch.device | str = "cpu",
        backend: str | None = None,
        mesh: "DeviceMesh | None" = None,
        pp_schedule: str | None = None,
        stages_per_rank: int = 1,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise TypeError(f"Trainer: config must be a TrainConfig, got config={shown(config)}")
        self.config, self.task, self.device = config, task, torch.device(device)
        require_int("Trainer", "stages_per_rank", stages_per_rank, least=1)
        self.ranks = Ranks(mesh, stages_per_rank)
        schedule = self.ranks.schedule(pp_schedule, config.accumulate)
        with self.ranks.named("the start of the run"):
            same = {"pp_schedule": pp_schedule, "stages_per_rank": stages_per_rank}
            self.ranks.require_same(_same_on_all_ranks(config, task) | same)
        torch.manual_seed(config.seed)
        # Weights are drawn on the CPU, so that every device starts with the same values.
        model = config.model_config
        self.model = replace(model, backend=backend or model.backend).build().to(self.device)
        self.ranks.require_batch(config.batch, config.accumulate, config.length)
        self.ranks.split(self.model)
        self.ranks.seed(config.seed)
        self.pipeline: Pipeline | None = None
        if schedule is not None:
            self.pipeline = Pipeline(self.ranks.stages, config.accumulate, schedule)
        self.routers = Routers(self.model)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.weight_decay),
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        if task.compares and config.accumulate > 1:
            raise ValueError(
                "Trainer: accumulate must be 1, as the loss compares the examples of a batch, "
                f"got accumulate={config.accumulate}"
            )
        self.augment: Augment | None = None
        if config.augment:
            if type(task) is not Digits:
                raise ValueError(
                    "Trainer: augment needs a task of images and their classes, "
                    f"got {type(task).__name__}, augment={config.augment}"
                )
            vision: Any = self.model.config
            self.augment = Augment(*config.augment, classes=vision.classes)
        self.step = 0
        self.losses: list[float] = []
        self.further: dict[str, list[float]] = {}
        self.seconds: list[float] = []  # for each step of this process
        self.held_out: list[dict[str, float]] = []

    def _autocast(self) -> torch.autocast:
        dtype = DTYPES[self.config.dtype]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _on_device(self, batch: Batch) -> Batch:
        return tuple(t.to(self.device) for t in batch)

    def _batch(self) -> Batch:
        """Returns the training examples of this step."""
        c, step = self.config, self.step
        batch = self.task.batch(c.batch, c.seed, step)
        if self.augment is None:
            return batch
        images, labels = batch
        return self.augment(images, labels, c.seed % 2**32, step)

    def train_step(self) -> float:
        """Runs one optimizer step and returns its loss.

        Raises:
            FloatingPointError: if the loss is not finite; the weights stay unchanged.
            RankError: another rank of the mesh failed, ended or does not answer; it is named.
        """
        with self.ranks.named(f"step {self.step}"):
            return self._step()

    def _step(self) -> float:
        start, c = time.perf_counter(), self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, c)
        self.model.zero_grad()  # optimizer.zero_grad imports torch._dynamo: 4 s at the first step
        parts = self.task.parts(self._batch(), c.accumulate * self.ranks.replicas)
        kept = [targets_of(part) for part in parts]
        own = self.ranks.own(list(zip(parts, kept, strict=True)))
        if self.pipeline is None:
            shares = [n / max(1, sum(kept)) if len(parts) > 1 else 1.0 for _, n in own]
            found = [self._backward(p, n) for (p, _), n in zip(own, shares, strict=True)]
        else:
            found = [self._through_stages(self.pipeline, [part for part, _ in own], sum(kept))]
        sums = {name: sum(values[name] for values in found) for name in found[0]}
        value = sums.pop(_LOSS)
        if c.clip_each:
            for parameter in self.model.parameters():
                clip_gradients([parameter], c.clip)
        else:
            self.ranks.clip(self.model, c.clip)
        done = self.step / max(1, c.steps if c.decay_steps is None else c.decay_steps)
        self.model.before_step(done)
        self.optimizer.step()
        self.model.after_step(done)
        self.routers.step(self.ranks.group)
        self.ranks.join(self.routers, self.model)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step += 1
        self.losses.append(value)
        for name, loss in sums.items():
            self.further.setdefault(name, []).append(loss)
        self.seconds.append(time.perf_counter() - start)
        return value

    def _backward(self, batch: Batch, share: float) -> dict[str, float]:
        """Adds the gradient of a part, times its share of the batch.

        Returns the losses times the share, summed over the ranks.
        """
        recompute = recompute_blocks(self.model) if self.config.recompute else nullcontext()
        with self.ranks.tokens(self._on_device(batch), share) as (own, share):
            with self._autocast(), recompute:
                loss = loss_of(self.model(*own))
            further = self.model.further_losses() | {_LOSS: loss.item()}
            values = self._finite({name: share * value for name, value in further.items()})
            total = loss + self.model.auxiliary_loss() + self.routers.loss()
            torch.autograd.backward(total if share == 1.0 else share * total)
        self.routers.add(share)
        return values

    def _through_stages(
        self, pipeline: Pipeline, parts: list[Batch], targets: int
    ) -> dict[str, float]:
        """Adds the gradients of all parts of this rank, of a batch with this number of targets.

        Returns the losses times the shares of the batch, summed over the ranks.
        """
        seen: list[dict[str, float]] = []

        def count(module: Any, given: Any, options: dict[str, Any], output: Any) -> None:
            share = options["share"].item()
            self.routers.add(share, module)
            seen.append({name: share * x for name, x in module.further_losses().items()})

        batch = self._on_device(tuple(map(torch.cat, zip(*parts, strict=True))))
        recompute = recompute_blocks(self.model) if self.config.recompute else nullcontext()
        stages = [stage.submod for stage in pipeline.stages]
        hooks = [stage.register_forward_hook(count, with_kwargs=True) for stage in stages]
        try:
            with self.ranks.tokens(batch, 1.0) as (own, _), self._autocast(), recompute:
                counts = [targets_of((t,)) for t in own[-1].chunk(len(parts))]
                shares = torch.tensor(counts, device=self.device) / max(1, targets)
                loss = pipeline.step(own, shares)
        finally:
            for hook in hooks:
                hook.remove()
        # The first step has one forward more of each stage, of which torch takes the shapes.
        routed = [stage for stage in stages if Routers(stage).layers]
        self.routers.discard(kept=len(parts) * len(routed))
        further = seen[-len(parts) * len(stages) :]
        sums = {name: sum(values[name] for values in further) for name in further[0]}
        return self._finite(sums | {_LOSS: loss})

    def _finite(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the sums of losses over the ranks; requires that the model's loss is finite."""
        sums = self.ranks.sums(values)
        if not math.isfinite(sums[_LOSS]):
            self.routers.discard()
            ranks = ", ".join(map(str, self.ranks.not_finite))
            place = f" on rank {ranks}" if ranks else ""
            raise FloatingPointError(f"the loss of step {self.step} is {sums[_LOSS]}{place}")
        return sums

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the loss on fixed held-out examples; records it and the metrics in `held_out`."""
        with self.ranks.named(f"the evaluation at step {self.step}"):
            return self._evaluate()

    def _evaluate(self) -> float:
        batch = self._on_device(self.task.held_out_batch(2 * self.config.batch))
        self.model.eval()
        metrics: dict[str, float] = {}
        with self._autocast():
            if self.pipeline is None:
                loss: float = loss_of(self.model(*batch)).item()
                metrics = self.task.metrics(self.model, batch)
            else:
                loss = self.ranks.sum_of_stages(self.pipeline.loss(batch))
                if type(self.task).metrics is not Task.metrics:
                    metrics = self.task.metrics(cast(Any, self.pipeline.logits), batch)
        self.model.train()
        self.held_out.append({"step": self.step, "loss": loss, **metrics})
        return loss

    def whole_model(self) -> Model:
        """Returns the model, or on a mesh a copy with all weights; all ranks call it."""
        if self.ranks.mesh is None:
            return self.model
        weights = {name: whole(t) for name, t in self.model.state_dict().items()}
        weights = self.ranks.of_stages(weights)
        model = self.model.config.build(device="meta")
        model.load_state_dict(weights, assign=True)
        return model.train(self.model.training)

    @property
    def items_per_second(self) -> float:
        """Returns tokens or images per second of this process, from the median step time."""
        if not self.seconds:
            return 0.0
        return self.config.batch * self.task.items_per_example / statistics.median(self.seconds)

    def save(self, path: Path) -> None:
        """Writes the state atomically; `models.load_model` can read the weights of the file.

        All ranks call it, and the first one writes. Runs on other meshes can load the file.
        """
        with self.ranks.named(f"the checkpoint of step {self.step}"):
            tensors = self._state()
        if self.ranks.is_first:
            self._write(path, tensors)

    def _state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a checkpoint, on the first rank."""
        tensors = {name: whole(t) for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{key}/{name}"] = whole(value)
        tensors = self.ranks.of_stages(tensors)
        for name, value in self.routers.history().items():
            tensors[f"routers/{name}"] = value
        return tensors | self.ranks.random_states()

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        config = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        if not isinstance(self.config.model, str):
            config["model"] = None  # it is in the model's metadata
        run = {
            "config": config,
            "data": self.task.digest,
            "step": self.step,
            "losses": self.losses,
            "further": self.further,
            "held_out": self.held_out,
        }
        write_checkpoint(path, tensors, model_metadata(self.model) | {"run": json.dumps(run)})

    def load(self, path: Path) -> None:
        """Restores the state written by `save`; the config and the data must be unchanged.

        Raises:
            OSError, CheckpointError: if the file cannot be read, is damaged or is of another run.
        """
        tensors, metadata = read_checkpoint(path)
        run = _run_of(path, metadata)
        if run["data"] != self.task.digest:
            raise CheckpointError(
                f"checkpoint: {path} was trained on other data than "
                f"{self.config.data or 'the default'} has now "
                f"(length-crc32 {run['data']}, got {self.task.digest})"
            )
        self.ranks.load(self.model, {n: t for n, t in tensors.items() if "/" not in n})
        parameters = dict(self.model.named_parameters())
        # Names from when every mixer was an attention.
        parameters |= {n.replace("mixer.", "self_attn."): p for n, p in parameters.items()}
        routers = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                key, _, parameter = rest.partition("/")
                if parameter not in parameters and self.pipeline is not None:
                    continue  # of another stage
                like = parameters[parameter]
                self.optimizer.state[like][key] = divided(tensor.to(self.device), like)
            elif kind == "routers":
                routers[rest] = tensor
        self.routers.restore(routers)
        self.ranks.set_random_state(tensors, self.config.seed, run["step"])
        self.step, self.losses = run["step"], run["losses"]
        self.held_out, self.further = run["held_out"], run.get("further", {})


def _run_of(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if "run" not in metadata:
        raise CheckpointError(f"checkpoint: {path} holds weights but no training state")
    run: dict[str, Any] = json.loads(metadata["run"])
    return run


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists of JSON as tuples."""
    return {name: tuple(value) for name, value in values.items() if isinstance(value, list)}


def saved_config(path: Path) -> TrainConfig:
    """Returns the config of the run that wrote a checkpoint.

    Raises:
        OSError, CheckpointError: if the file cannot be read, is damaged or holds no run.
    """
    _, metadata = read_checkpoint(path)
    values = _run_of(path, metadata)["config"]
    if values.get("model") not in (None, *PRESETS):
        raise CheckpointError(f"checkpoint: {path} is of an unknown model {values['model']!r}")
    model = values.get("model") or config_of(metadata)
    try:
        return TrainConfig(**values | _tuples(values) | {"model": model})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is of another version of omniattn ({error})"
        ) from error
