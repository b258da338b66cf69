"""Base classes of token mixers with one matrix state per head."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm, RMSNormGated
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.state_mixer import StateMixer

Device: TypeAlias = "torch.device | str | None"
#: Outputs, and the final state or states.
Result: TypeAlias = tuple[Tensor, Any]


@dataclass(frozen=True)
class RecurrentConfig(LayerConfig):
    """Common sizes and options of recurrent mixers.

    Args:
        dim: width of x and y.
        num_heads: number of heads of q and k.
        num_v_heads: number of heads of v, each with a state; a multiple of num_heads, the default.
        head_dim: width of a head of q and k, default dim // num_heads; half of that in
            GatedLinearAttention.
        v_head_dim: width of a head of v, default head_dim; twice that in GatedLinearAttention,
            GatedDeltaNet and MultiScaleRetention.
        conv_size: number of taps of the causal convolutions with SiLU on q, k and v; 0 for none.
        conv_bias: True if the convolutions have biases.
        gate: activation of the output gate: "silu", "sigmoid", or None for no gate.
        norm_eps: eps of the output norm, which is per head.
        init_std, backend: as in Attention.
    """

    #: Factors of the defaults: head_dim = dim // (num_heads * shrink), v_head_dim = expand *
    #: head_dim.
    shrink: ClassVar[int] = 1
    expand: ClassVar[int] = 1
    #: True if the output norm is over all heads together.
    joint_norm: ClassVar[bool] = False

    dim: Size
    num_heads: Size
    num_v_heads: Size | None = None
    head_dim: Size | None = None
    v_head_dim: Size | None = None
    conv_size: int = 4
    conv_bias: bool = False
    gate: str | None = "silu"
    norm_eps: Epsilon = 1e-5
    init_std: float = 0.02
    backend: Backend = None

    def __post_init__(self) -> None:
        super().__post_init__()
        op = self.layer.__name__
        parts = self.num_heads * self.shrink
        if self.head_dim is None and self.dim % parts:
            raise ValueError(
                f"{op}: dim must be a multiple of {parts} where head_dim is None, "
                f"got dim={self.dim}, num_heads={self.num_heads}"
            )
        if self.v_heads % self.num_heads:
            raise ValueError(
                f"{op}: num_v_heads must be a multiple of num_heads, "
                f"got num_v_heads={self.num_v_heads}, num_heads={self.num_heads}"
            )
        if self.gate not in (None, "silu", "sigmoid"):
            raise ValueError(
                f"{op}: gate must be 'silu', 'sigmoid' or None, got gate={shown(self.gate)}"
            )

    @property
    def v_heads(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def k_size(self) -> int:
        """Width of a head of q and k."""
        return self.head_dim or self.dim // (self.num_heads * self.shrink)

    @property
    def v_size(self) -> int:
        """Width of a head of v."""
        return self.v_head_dim or self.k_size * self.expand

    @property
    def updates(self) -> int:
        """Number of keys and values of a token in each head."""
        return 1

    @property
    def state_size(self) -> tuple[int, ...]:
        """Shape of a head's state."""
        return self.k_size, self.v_size

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the states of a sequence."""
        return {"s": (self.v_heads, *self.state_size)}


class RecurrentMixer(StateMixer):
    """Computes ``y = W_o (norm(o) * act(x W_g))`` of a recurrence o = recur(q, k, v).

    q, k and v are ``silu(conv(x W))`` each. A subclass has a `Config` derived from RecurrentConfig
    and defines `recur`. The norm is per head of o, or of all heads if the config has
    `joint_norm`. Decoding takes one step of the recurrence per token, in constant time.
    """

    #: True to apply SiLU to q, k and v even without convolutions.
    activates = True
    #: Activation of the convolutions.
    conv_activation: str | None = "silu"
    #: Names of those of q, k and v that are convolved and activated.
    convolved = "qkv"

    def __init__(
        self, config: RecurrentConfig, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = c.num_heads * c.k_size, c.v_heads * c.v_size
        widths = {"q": keys, "k": c.updates * keys, "v": c.updates * values}
        for name, width in widths.items():
            self.add_module(f"{name}_proj", linear(c, c.dim, width, **factory))
            if c.conv_size > 0 and name in self.convolved:
                conv = ShortConvolution.Config(
                    width, c.conv_size, c.conv_bias, self.conv_activation, c.backend
                )
                self.add_module(f"{name}_conv1d", conv.build(**factory))
        width = values if c.joint_norm else c.v_size
        if c.gate is None:
            norm: LayerConfig = RMSNorm.Config(width, c.norm_eps, backend=c.backend)
        else:
            self.g_proj: nn.Module = linear(c, c.dim, values, **factory)
            norm = RMSNormGated.Config(width, c.norm_eps, activation=c.gate, backend=c.backend)
        self.o_norm = norm.build(**factory)
        self.o_proj = linear(c, values, c.dim, **factory)

    @abstractmethod
    def recur(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> Result:
        """Maps q, k (B, T, H, K), v (B, T, Hv, V), x (B, T, dim) to o like v and the final state.

        With n updates of a token k is (B, T, n H, K) and v (B, T, n Hv, V). The options are the
        function's initial_state, cu_seqlens and backend. States are a tuple if the config's
        `states` names several.
        """

    def rotated(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Applies rotary embeddings to q and k where the config has `rope_interleaved`.

        Others need none, as recurrences encode order.
        """
        c = self.config
        interleaved = getattr(c, "rope_interleaved", None)
        if interleaved is None:
            return q, k
        return functional.apply_rotary(q, k, *rope, interleaved=interleaved, backend=c.backend)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: states in fp32 (fp64 for fp64), and those of the convolutions.

        By default there is one state, `s` (B, Hv, K, V).
        """
        c = self.config
        wide = zeros_of_states(self.o_proj.weight, storage)
        tensors = {name: wide.new_zeros(batch, *shape) for name, shape in c.states.items()}
        if c.conv_size > 0:
            like = wide.new_zeros(0, dtype=storage_like(self.o_proj.weight, **storage)["dtype"])
            for name in self.convolved:
                tensors[f"{name}_conv"] = self._conv(name).new_state(batch, like)
        return RecurrentState(**tensors)

    def _mix(
        self,
        x: Tensor,
        state: RecurrentState | None,
        sequences: Sequences,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        after: dict[str, Tensor] = {}
        q, k, v = (self._part(name, x, state, sequences, after) for name in "qkv")
        if rope is not None:
            q, k = self.rotated(q, k, rope)
        names = tuple(c.states)
        before: Any = None
        if state is not None:
            before = state[names[0]] if len(names) == 1 else tuple(state[name] for name in names)
        options = {"cu_seqlens": sequences.cu_seqlens, "backend": c.backend}
        o, final = self.recur(q, k, v, x, initial_state=before, **options)
        after |= zip(names, (final,) if len(names) == 1 else final, strict=True)
        normed = [o] if c.gate is None else [o, self.g_proj(x).unflatten(-1, o.shape[2:])]
        if c.joint_norm:
            normed = [t.flatten(-2) for t in normed]
        return self.o_proj(self.o_norm(*normed).flatten(2)), after

    def _conv(self, name: str) -> ShortConvolution:
        return cast(ShortConvolution, self.get_submodule(f"{name}_conv1d"))

    def _part(
        self,
        name: str,
        x: Tensor,
        state: RecurrentState | None,
        sequences: Sequences,
        after: dict[str, Tensor],
    ) -> Tensor:
        """Computes q, k or v, and stores the state of its convolution in `after`."""
        c = self.config
        y: Tensor = self.get_submodule(f"{name}_proj")(x)
        convolved = name in self.convolved
        if convolved and c.conv_size > 0:
            key = f"{name}_conv"
            before = None if state is None else state[key].to(y.dtype)
            y, after[key] = self._conv(name)(y, before, sequences.cu_seqlens)
        elif convolved and self.activates:
            y = nnf.silu(y)
        heads = c.v_heads if name == "v" else c.num_heads
        if name != "q":
            heads *= c.updates
        return y.unflatten(-1, (heads, -1))


def linear(
    config: RecurrentConfig, n_in: int, n_out: int, bias: bool = False, **factory: Any
) -> Linear:
    """Builds a linear layer with the config's init_std and backend."""
    own = Linear.Config(n_in, n_out, bias, config.init_std, config.backend)
    return Linear(own, **factory)


def low_rank(
    config: RecurrentConfig, rank: int, n_out: int, bias: bool = False, **factory: Any
) -> nn.Sequential:
    """Builds two linear layers dim -> rank -> n_out."""
    inner = linear(config, config.dim, rank, **factory)
    return nn.Sequential(inner, linear(config, rank, n_out, bias, **factory))


def fp32(dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a layer's fp32 parameters and states: fp64 if `dtype` is, else fp32."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_steps(bias: Tensor, least: float, most: float, floor: float = 0.0) -> None:
    """Draws softplus(bias) log-uniformly from (least, most), clamped to at least `floor`."""
    dt = torch.empty_like(bias, dtype=fp32(bias.dtype))
    dt = dt.uniform_(math.log(least), math.log(most)).exp_().clamp_(min=floor)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def zeros_of_states(weight: Tensor, storage: Storage) -> Tensor:
    """Returns an empty tensor with the device and dtype of a matrix state."""
    like = storage_like(weight, **storage)
    # Not weight.new_zeros, since a weight may be a DTensor, but states are a rank's own.
    return torch.zeros(0, device=like["device"], dtype=fp32(like["dtype"]))
