"""Training of a decoder: AdamW, warm-up and cosine, clipping; resumable bit for bit."""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omniattn.models.checkpoint import (
    CheckpointError,
    model_metadata,
    read_checkpoint,
    write_checkpoint,
)
from omniattn.models.data import ByteData
from omniattn.models.llama import PRESETS, Llama

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """What determines a training run besides the text.

    Args:
        model: a name in PRESETS.
        steps, batch, length: optimizer steps; windows per step; tokens per window.
        dtype: "float32", or "bfloat16" for autocast with fp32 weights.
        seed: of the weights and of the choice of windows.
        lr, min_lr, warmup: peak and final learning rate; steps of linear warm-up.
        betas, eps, weight_decay: of AdamW.
        clip: bound of the gradient's norm.
    """

    model: str = "llama-small"
    steps: int = 200
    batch: int = 8
    length: int = 256
    dtype: str = "float32"
    seed: int = 0
    lr: float = 2e-3
    min_lr: float = 2e-4
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear from 0 to lr during the warm-up, then half a cosine down to min_lr."""
    c = config
    if step < c.warmup:
        return c.lr * step / c.warmup
    done = min(1.0, (step - c.warmup) / max(1, c.steps - c.warmup))
    return c.min_lr + 0.5 * (c.lr - c.min_lr) * (1 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices; none on vectors (norms, biases) and embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in embeddings]
    others = [p for p in parameters if p.dim() < 2 or id(p) in embeddings]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class Trainer:
    """The state of a run: model, optimizer, step and history.

    A step is a function of this state and of the text, so a run that is saved, loaded and
    continued ends with the same bits as one that was not interrupted.

    Args:
        config: of the run.
        data: the text.
        device: of model and batches.
        backend: of all ops, e.g. "reference".
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ByteData,
        *,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.config, self.data, self.device = config, data, torch.device(device)
        torch.manual_seed(config.seed)
        # Weights are drawn on the CPU, so that every device starts from the same ones.
        self.model = Llama(replace(PRESETS[config.model], backend=backend)).to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.weight_decay),
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.step = 0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.held_out: list[tuple[int, float]] = []

    def _loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, targets = (t.to(self.device) for t in batch)
        dtype = DTYPES[self.config.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss: torch.Tensor = self.model(tokens, targets)
        return loss

    def train_step(self) -> float:
        """One optimizer step; returns its loss.

        Raises:
            FloatingPointError: if the loss is not finite; the weights are then unchanged.
        """
        start, c = time.perf_counter(), self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, c)
        self.model.zero_grad()  # the optimizer's own imports torch._dynamo: 4 s at the first step
        loss = self._loss(self.data.batch(c.batch, c.seed, self.step))
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss of step {self.step} is {value}")
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step += 1
        self.losses.append(value)
        self.seconds.append(time.perf_counter() - start)
        return value

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on fixed windows of the held-out text; the value is kept in `held_out`."""
        self.model.eval()
        value = self._loss(self.data.held_out_batch(2 * self.config.batch)).item()
        self.model.train()
        self.held_out.append((self.step, value))
        return value

    @property
    def tokens_per_second(self) -> float:
        """Training speed, from the median time of a step."""
        if not self.seconds:
            return 0.0
        median = sorted(self.seconds)[len(self.seconds) // 2]
        return self.config.batch * self.config.length / median

    def save(self, path: Path) -> None:
        """Writes the whole state atomically. `models.load_model` reads the weights of this file."""
        tensors = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{key}/{name}"] = value
        tensors["rng/cpu"] = torch.get_rng_state()
        run = {
            "config": asdict(self.config),
            "data": self.data.digest,
            "step": self.step,
            "losses": self.losses,
            "seconds": self.seconds,
            "held_out": self.held_out,
        }
        write_checkpoint(path, tensors, model_metadata(self.model) | {"run": json.dumps(run)})

    def load(self, path: Path) -> None:
        """Restores what `save` wrote; config and text must be the same.

        Raises:
            OSError, CheckpointError: if the file cannot be read, is damaged or is of another run.
        """
        tensors, metadata = read_checkpoint(path)
        run = _run_of(path, metadata)
        if run["data"] != self.data.digest:
            raise CheckpointError(
                f"checkpoint: {path} was trained on another text "
                f"(length-crc32 {run['data']}, got {self.data.digest})"
            )
        self.model.load_state_dict({n: t for n, t in tensors.items() if "/" not in n})
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                key, _, parameter = rest.partition("/")
                state = self.optimizer.state[parameters[parameter]]
                state[key] = tensor.to(self.device)
        torch.set_rng_state(tensors["rng/cpu"])
        self.step, self.losses, self.seconds = run["step"], run["losses"], run["seconds"]
        self.held_out = [(step, loss) for step, loss in run["held_out"]]


def _run_of(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if "run" not in metadata:
        raise CheckpointError(f"checkpoint: {path} holds weights but no training state")
    run: dict[str, Any] = json.loads(metadata["run"])
    return run


def saved_config(path: Path) -> TrainConfig:
    """The config of the run that wrote this checkpoint.

    Raises:
        OSError, CheckpointError: if the file cannot be read, is damaged or holds no run.
    """
    _, metadata = read_checkpoint(path)
    values = _run_of(path, metadata)["config"]
    return TrainConfig(**values | {"betas": tuple(values["betas"])})
