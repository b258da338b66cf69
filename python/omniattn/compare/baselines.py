"""Mixers of torch.nn for comparison: RNN, LSTM and GRU, and modules of users."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.checks.arguments import require_choice, shown
from omniattn.functional.masks import Mask
from omniattn.modules import LayerConfig, Linear, Mixer, RecurrentState, State
from omniattn.modules.base.fields import Size
from omniattn.modules.base.mixer import require_no_mask, require_tokens
from omniattn.modules.base.state import Storage, takes_cache
from omniattn.modules.caches.cache import storage_like

_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class TorchRecurrence(Mixer):
    """Computes y = W_o h with the hidden states h of one layer of torch.nn.RNN, LSTM or GRU.

    Args:
        config: width and kind of the cell.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim).

    Reference:
        Elman, "Finding Structure in Time", 1990; Hochreiter and Schmidhuber, "Long Short-Term
        Memory", 1997; Cho et al., 2014, arXiv 1406.1078.
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Width; `cell` is "rnn", "lstm" or "gru"; `init_std` of W_o."""

        dim: Size
        cell: str = "lstm"
        init_std: float = 0.02

        def __post_init__(self) -> None:
            super().__post_init__()
            require_choice("TorchRecurrence", "cell", self.cell, tuple(_CELLS))

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.cell = _CELLS[c.cell](c.dim, c.dim, batch_first=True, device=device, dtype=dtype)
        self.o_proj = Linear(c.dim, c.dim, init_std=c.init_std, device=device, dtype=dtype)

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the tensors of the state."""
        return ("h", "c") if self.config.cell == "lstm" else ("h",)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros `h`, and for an LSTM also `c`."""
        own = storage_like(self.o_proj.weight, **storage)
        zeros = {name: torch.zeros(batch, self.config.dim, **own) for name in self._names}
        return RecurrentState(**zeros)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim); `rope` is ignored, and a mask must be None."""
        require_no_mask("TorchRecurrence", mask)
        require_tokens("TorchRecurrence", x, self.config.dim)
        before = None
        if state is not None:
            if not isinstance(state, RecurrentState):
                raise TypeError(
                    f"TorchRecurrence: state must be a RecurrentState, got state={shown(state)}"
                )
            tensors = tuple(state[name][None].to(x.dtype) for name in self._names)
            before = tensors if len(tensors) == 2 else tensors[0]
        h, after = self.cell(x, before)
        if isinstance(state, RecurrentState):
            last = after if isinstance(after, tuple) else (after,)
            named = zip(self._names, last, strict=True)
            state.advance(x.shape[1], **{name: t[0] for name, t in named})
        y: Tensor = self.o_proj(h)
        return y


class ModuleMixer(Mixer):
    """Lets any module (B, T, dim) -> (B, T, dim) be the mixer of a block, without a state.

    Args:
        config: width, and what makes the module.
        device, dtype: device and dtype of the parameters.
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Width, and a class or function that returns the module of a width."""

        dim: Size
        make: Callable[[int], nn.Module]

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device or torch.get_default_device()):
            self.module = config.make(config.dim).to(dtype=dtype)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim); `rope` is ignored, mask and state must be None."""
        require_no_mask("ModuleMixer", mask)
        if state is not None:
            raise ValueError("ModuleMixer: state must be None, as the module keeps none")
        y = self.module(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"compare: {_name(self.config.make)}: the output must have the shape of x, "
                f"{tuple(x.shape)}, got {got}"
            )
        return y


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def takes_width(make: Any) -> bool:
    """Returns True if `make(width)` is a valid call."""
    try:
        inspect.signature(make).bind(8)
    except (TypeError, ValueError):
        return False
    return True
