"""A mixer with a state of its own, as a user defines one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn.modules import (
    LayerConfig,
    Linear,
    Mixer,
    RecurrentState,
)
from omniattn.modules.base.layer import config_or_fields


class Average(Mixer):
    """y_t = W h_t, h_t = decay h_{t-1} + (1 - decay) (x_t - x_{t-1})."""

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes; `decay` in [0, 1]."""

        dim: int
        decay: float = 0.8

    @config_or_fields(Config)
    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        self.config = config
        self.proj = Linear(config.dim, config.dim, init_std=0.5, device=device, dtype=dtype)

    def new_state(self, batch, max_length, *, device=None, dtype=None):
        like = self.proj.weight.new_zeros(batch, self.config.dim, device=device, dtype=dtype)
        return RecurrentState(h=like, last=like.clone())

    def forward(self, x: Tensor, *, state=None, rope=None, mask=None) -> Tensor:
        if mask is not None:
            raise ValueError("Average: mask must be None")
        before = self.new_state(len(x), 0, dtype=x.dtype) if state is None else state
        h, steps = before["h"], []
        for change in (x - torch.cat([before["last"][:, None], x[:, :-1]], 1)).unbind(1):
            h = self.config.decay * h + (1 - self.config.decay) * change
            steps.append(h)
        if state is not None:
            state.advance(x.shape[1], h=h, last=x[:, -1])
        return self.proj(torch.stack(steps, 1))
