"""Placement of norms: gradient norms by depth, and losses with and without warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.compare.cells import Cell, Result, described
from omniattn.compare.losses import train_config, trained_for, warmup_of
from omniattn.compare.mixers import Frame
from omniattn.compare.settings import Settings
from omniattn.functional.masks import Mask
from omniattn.models import BlocksConfig, Decoder
from omniattn.modules import (
    Attention,
    DecoderBlock,
    GatedMLP,
    LayerNorm,
    Residual,
    RotaryEmbedding,
    State,
)
from omniattn.training import TextTask, Trainer

#: Placements of `omniattn.modules.Residual`, by their names in the report.
PLACEMENTS = {
    "pre": "pre",
    "post": "post",
    "sandwich": "sandwich",
    "post in residual": "post_in_residual",
}
WARMUPS = ("warm-up", "no warm-up")
#: Peak learning rate, relative to other parts, at which warm-up matters.
_FASTER = 3


class PlacedBlock(nn.Module):
    """Block of a mixer and a channel mixer with norms placed by `placement`.

    Args:
        config: mixer, channel mixer and norm.
        placement: as in `omniattn.modules.Residual`.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, config: DecoderBlock.Config, placement: str, **factory: Any) -> None:
        super().__init__()
        assert config.mlp is not None
        residual = Residual.Config(config.norm, placement)
        self.mixer = Residual(config.mixer.build(**factory), residual, **factory)
        self.mlp = Residual(config.mlp.build(**factory), residual, **factory)

    def forward(
        self,
        x: Tensor,
        residual: None = None,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        """Maps x (B, T, dim) to the same shape; without a second part of the residual stream."""
        x = self.mixer(x, state=state, rope=rope, mask=mask)
        return self.mlp(x), None


class PlacedDecoder(Decoder):
    """Decoder of blocks with any placement of norms; with "post" no norm follows the last block."""

    config: PlacedConfig

    def __init__(self, config: PlacedConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        if config.placement == "post":
            self.norm = nn.Identity()

    def _blocks(self, **factory: Any) -> Iterator[nn.Module]:
        c = self.config
        return (PlacedBlock(c.block(i), c.placement, **factory) for i in range(c.num_layers))


@dataclass(frozen=True)
class PlacedConfig(BlocksConfig):
    """Config of a PlacedDecoder."""

    placement: str = "pre"

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PlacedDecoder:
        return PlacedDecoder(self, device=device, dtype=dtype)


def placed_config(frame: Frame, placement: str) -> PlacedConfig:
    """Returns a decoder with rotary attention, gated MLPs and LayerNorm."""
    block = DecoderBlock.Config(
        frame.drawn(Attention.Config(frame.dim, frame.heads)),
        frame.drawn(GatedMLP.Config(frame.dim, round(8 / 3 * frame.dim))),
        LayerNorm.Config(frame.dim),
    )
    return PlacedConfig(
        vocab_size=frame.vocab,
        dim=frame.dim,
        num_layers=frame.layers,
        blocks=(block,),
        rope=RotaryEmbedding.Config(frame.dim // frame.heads),
        init_std=frame.init_std,
        placement=placement,
    )


def cells(frame: Frame, settings: Settings, task: TextTask) -> Iterator[Cell]:
    """Yields a run for each placement, with and without warm-up, and seed."""
    frame = replace(frame, layers=settings.norm_layers)
    for placement in PLACEMENTS:
        for warmup in WARMUPS:
            for seed in settings.seeds:
                given = trained_for(settings, task) | {"steps": settings.norm_steps}
                given |= {"frame": described(frame)}

                def compute(
                    placement: str = placement, warmup: str = warmup, seed: int = seed
                ) -> Result:
                    config = placed_config(frame, PLACEMENTS[placement])
                    return _train(config, settings, task, seed, warmup == WARMUPS[0])

                yield Cell("norms", placement, warmup, seed, given, compute)


def _train(
    config: PlacedConfig, settings: Settings, task: TextTask, seed: int, warm: bool
) -> Result:
    steps = settings.norm_steps
    trainer = Trainer(
        train_config(
            config,
            replace(settings, lr=_FASTER * settings.lr),
            seed,
            steps=steps,
            length=settings.length,
            warmup=2 * warmup_of(steps) if warm else 0,
        ),
        task,
    )
    first = gradient_norms(trainer)
    diverged = False
    for _ in range(steps):
        try:
            trainer.train_step()
        except FloatingPointError:
            diverged = True
            break
    last = None if diverged else gradient_norms(trainer)
    held_out = None if diverged else trainer.evaluate()
    return {"losses": trainer.losses, "held_out": held_out, "first": first, "last": last}


def gradient_norms(trainer: Trainer) -> list[float]:
    """Returns the norm of the gradient of each layer's parameters, on held-out texts."""
    model: Any = trainer.model
    model.zero_grad()
    model(*trainer.task.held_out_batch(trainer.config.batch)).backward()
    norms = []
    for layer in model.layers:
        squares = [p.grad.double().square().sum() for p in layer.parameters()]
        norms.append(float(torch.stack(squares).sum().sqrt()))
    model.zero_grad()
    return norms
