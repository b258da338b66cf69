"""RWKV layers: base classes, the time mix of RWKV-4, and the channel mix of all versions."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import autocast_dtype, require_float, require_like
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import ChannelMixer
from omniattn.modules.base.state import RecurrentState, State, Stateful, Storage, takes_cache
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer, read
from omniattn.modules.rwkv._initial import ramp, zigzag

__all__ = ["RWKV4TimeMix", "RWKVChannelMix"]


@dataclass(frozen=True)
class RWKVConfig(LayerConfig):
    """Common options of RWKV layers.

    Args:
        dim: width of x and y.
        layer_idx, num_layers: index of the layer in its model, from 0, and number of layers; the
            initial parameters depend on them.
        init_std, backend: as in Attention.
    """

    dim: Size
    layer_idx: int = 0
    num_layers: Size = 1
    init_std: float = 0.02
    backend: Backend = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_idx >= self.num_layers:
            raise ValueError(
                f"{self.layer.__name__}: layer_idx must be below num_layers, "
                f"got layer_idx={self.layer_idx}, num_layers={self.num_layers}"
            )

    @property
    def depth(self) -> float:
        """Relative depth: 0 for the first layer, 1 for the last."""
        return self.layer_idx / max(self.num_layers - 1, 1)

    @property
    def height(self) -> float:
        """Relative distance from the output: 1 for the first layer, near 0 for the last."""
        return 1 - self.layer_idx / self.num_layers


class Shifted(nn.Module):
    """Base class of layers with token shift: inputs ``x_t + (x_{t-1} - x_t) * mu``, one mu a part.

    The parameters mu are named x_k etc., as in RWKV-7, or time_maa_k etc., as in RWKV-6.
    `load_state_dict` accepts both, and 1 - mu as time_mix_k (RWKV-4 and 5) or time_mix_key
    (transformers).
    """

    parts: str  # one letter per part
    prefix = "x_"  # prefix of the names of mu
    config: RWKVConfig

    if TYPE_CHECKING:  # most parameters are registered dynamically by name

        def __getattr__(self, name: str) -> Any: ...

    @property
    def undecayed(self) -> tuple[str, ...]:
        """Parameters without weight decay: all but the weights of linear layers, as in RWKV-LM."""
        return tuple(name for name, _ in self.named_parameters(recurse=False))

    def _add_shifts(self, device: Device, dtype: torch.dtype | None) -> None:
        for part in self.parts:
            mu = torch.empty(1, 1, self.config.dim, device=device, dtype=dtype)
            self.register_parameter(self.prefix + part, nn.Parameter(mu))
        self.register_load_state_dict_pre_hook(_rename_shifts)

    def _mixed(
        self, x: Tensor, sequences: Sequences, before: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Returns x_{t-1} - x_t, the inputs of the parts, and the last token of each sequence.

        `before` (N, dim), or zeros, precedes the first tokens.
        """
        op, mus = type(self).__name__, [getattr(self, self.prefix + part) for part in self.parts]
        require_float(op, "x", x)
        if autocast_dtype(x) is None:
            require_like(op, "x", x, mus[0], self.prefix + self.parts[0])
        earlier, last = sequences.before(x, before)
        difference = earlier - x
        return difference, [torch.addcmul(x, difference, mu) for mu in mus], last


def _rename_shifts(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames mu from other versions of RWKV and from transformers."""
    assert isinstance(layer, Shifted)
    words = {"k": "key", "v": "value", "r": "receptance"}
    for part in layer.parts:
        ours = prefix + layer.prefix + part
        for name in (f"time_mix_{part}", f"time_mix_{words.get(part, part)}"):
            if prefix + name in state_dict:
                state_dict[ours] = 1 - state_dict.pop(prefix + name)
        for name in (f"x_{part}", f"time_maa_{part}"):
            if prefix + name in state_dict:
                state_dict[ours] = state_dict.pop(prefix + name)


def linear_of(c: RWKVConfig, n_in: int, n_out: int, **factory: Any) -> Linear:
    return Linear(Linear.Config(n_in, n_out, False, c.init_std, c.backend), **factory)


def reset_old_shifts(layer: Shifted) -> None:
    """Initialises mu as RWKV-4 to 6 do."""
    c = layer.config
    for part in layer.parts:
        power = 0.5 * c.height if part in "rg" else c.height
        kept = ramp(c.dim) ** power + (0.3 * c.depth if part == "v" else 0.0)
        layer.get_parameter(layer.prefix + part).copy_(1 - kept)


class TimeMix(Shifted, StateMixer):
    """Base class of recurrences over receptance, key and value."""

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates `shift` (B, dim), the last input, and `wkv`, the recurrence's state in fp32."""
        weight = next(self.parameters())
        like = weight.new_zeros(0, **storage_like(weight, **storage))
        wide = zeros_of_states(weight, storage)
        return RecurrentState(
            shift=like.new_zeros(batch, self.config.dim), wkv=self._empty(batch, wide)
        )

    @abstractmethod
    def _empty(self, batch: int, like: Tensor) -> Tensor:
        """Returns the recurrence's state before the first token."""

    @abstractmethod
    def _recur(
        self,
        x: Tensor,
        difference: Tensor,
        inputs: list[Tensor],
        shared: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Computes y and the state after x from x_{t-1} - x_t and the inputs of the parts.

        The options are the function's initial_state, cu_seqlens and backend.
        """

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x, state, mask: as in StateMixer.
            rope: ignored.
            shared: tensors that layers pass to later layers within a call of the model (RWKV-7: the
                values of the first layer).
        """
        return self._run(x, state, mask, shared=shared)

    def _mix(
        self,
        x: Tensor,
        state: RecurrentState | None,
        sequences: Sequences,
        *,
        shared: dict[str, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shift, wkv = (None, None) if state is None else (state["shift"], state["wkv"])
        difference, inputs, last = self._mixed(x, sequences, shift)
        y, wkv = self._recur(
            x,
            difference,
            inputs,
            shared,
            initial_state=wkv,
            cu_seqlens=sequences.cu_seqlens,
            backend=self.config.backend,
        )
        return y, {"shift": last, "wkv": wkv}


class RWKV4TimeMix(TimeMix):
    """Attention-free mixing: a mean of values weighted by e^key and a decay with distance.

    ``y = W_o (sigmoid(r) * wkv(k, v))`` with the wkv of :func:`functional.rwkv4`,
    w = exp(time_decay), u = time_first, and r, k, v linear in x_t and x_{t-1}.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; time_decay and time_first are created in
            fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters time_decay, time_first (dim), x_k, x_v, x_r (1, 1, dim), receptance, key, value,
        output.

    Reference:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, arXiv 2305.13048.

    Example:
        >>> RWKV4TimeMix(8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    parts = "kvr"

    @dataclass(frozen=True)
    class Config(RWKVConfig):
        """Sizes and options, as in RWKVConfig."""

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        self._add_shifts(device, dtype)
        for name in ("time_decay", "time_first"):
            like = torch.empty(c.dim, device=device, dtype=fp32(dtype))
            self.register_parameter(name, nn.Parameter(like))
        for name in ("receptance", "key", "value", "output"):
            self.add_module(name, linear_of(c, c.dim, c.dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters as BlinkDL's code does."""
        c = self.config
        reset_old_shifts(self)
        n = ramp(c.dim, last=True)
        self.time_decay.copy_(-5 + 8 * n ** (0.7 + 1.3 * c.depth))
        self.time_first.copy_(zigzag(c.dim) * 0.5 + torch.tensor(0.3).log())

    def _empty(self, batch: int, like: Tensor) -> Tensor:
        state = like.new_zeros(batch, 3, self.config.dim)
        state[:, 2] = -1e38
        return state

    def _recur(
        self,
        x: Tensor,
        difference: Tensor,
        inputs: list[Tensor],
        shared: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        k, v, r = self.key(inputs[0]), self.value(inputs[1]), self.receptance(inputs[2])
        y, wkv = functional.rwkv4(self.time_decay.exp(), self.time_first, k, v, **options)
        return self.output(r.sigmoid() * y), wkv


class RWKVChannelMix(Shifted, ChannelMixer, Stateful):
    """Feed-forward layer with token shift.

    ``y = W_v relu(W_k x_k)^2``, in versions 4 to 6 multiplied by ``sigmoid(W_r x_r)``, with
    ``x_k = x_t + (x_{t-1} - x_t) * mu_k``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters x_k (1, 1, dim), key, value, as in RWKV-7; with a receptance time_maa_k,
        time_maa_r, receptance, key, value, as in RWKV-6. `load_state_dict` accepts the names of all
        versions.

    Reference:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, arXiv 2305.13048.

    Example:
        >>> RWKVChannelMix(8, hidden_dim=32)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(RWKVConfig):
        """Sizes and options.

        Args:
            hidden_dim: inner width; default 4 dim.
            receptance: True to gate the result; False in RWKV-7.
        """

        hidden_dim: Size | None = None
        receptance: bool = True

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        self.parts, self.prefix = ("kr", "time_maa_") if c.receptance else ("k", "x_")
        self._add_shifts(device, dtype)
        hidden = c.hidden_dim or 4 * c.dim
        self.key = linear_of(c, c.dim, hidden, device=device, dtype=dtype)
        self.value = linear_of(c, hidden, c.dim, device=device, dtype=dtype)
        if c.receptance:
            self.receptance = linear_of(c, c.dim, c.dim, device=device, dtype=dtype)
        else:
            self.draws("key", "value")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as BlinkDL's code does: with a receptance as RWKV-4 to 6, else as RWKV-7."""
        c = self.config
        for part in self.parts:
            power = c.height if c.receptance else c.height**4
            self.get_parameter(self.prefix + part).copy_(1 - ramp(c.dim) ** power)
        if not c.receptance:
            bound = 0.5 * c.dim**-0.5
            nn.init.uniform_(self.key.weight, -bound, bound)
            nn.init.zeros_(self.value.weight)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates `shift` (B, dim), the last input."""
        weight = self.key.weight
        like = weight.new_zeros(0, **storage_like(weight, **storage))
        return RecurrentState(shift=like.new_zeros(batch, self.config.dim))

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim); x, state and mask as in StateMixer."""
        tokens, sequences, before = read(self, x, state, mask)
        shift = None if before is None else before["shift"]
        _, inputs, last = self._mixed(tokens, sequences, shift)
        y: Tensor = self.value(torch.relu(self.key(inputs[0])).square())
        if self.config.receptance:
            y = torch.sigmoid(self.receptance(inputs[1])) * y
        if before is not None:
            before.advance(x.shape[1], shift=last)
        return sequences.restored(y)
