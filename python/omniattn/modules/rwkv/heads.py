"""Time mixes of RWKV-5, 6 and 7, with one matrix state per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.norm import GroupNorm
from omniattn.modules.recurrent.recurrent import Device, fp32
from omniattn.modules.rwkv._initial import ramp, rank_of, zigzag
from omniattn.modules.rwkv.layers import RWKVConfig, TimeMix, linear_of, reset_old_shifts

__all__ = ["RWKV5TimeMix", "RWKV6TimeMix", "RWKV7TimeMix"]

_FIRST_VALUES = "v_first"


@dataclass(frozen=True)
class RWKVHeadsConfig(RWKVConfig):
    """Options of RWKV layers with heads.

    Args:
        head_dim: width of a head; must divide dim.
        head_norm_eps: epsilon of the norm of each head's output. RWKV-5's code normalises y / 8
            with 1e-5; for y this is 64e-5.
    """

    head_dim: Size = 64
    head_norm_eps: Epsilon = 64e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.head_dim:
            raise ValueError(
                f"{self.layer.__name__}: dim must be a multiple of head_dim, got dim={self.dim}, "
                f"head_dim={self.head_dim}"
            )

    @property
    def heads(self) -> int:
        return self.dim // self.head_dim


class _HeadsTimeMix(TimeMix):
    """Base class of time mixes with one matrix state and one output norm per head."""

    config: RWKVHeadsConfig

    def __init__(
        self,
        config: RWKVHeadsConfig,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self._add_shifts(device, dtype)
        for name in ("receptance", "key", "value", "output"):
            self.add_module(name, linear_of(c, c.dim, c.dim, device=device, dtype=dtype))
        norm = GroupNorm.Config(c.dim, c.heads, c.head_norm_eps, backend=c.backend)
        self.ln_x = GroupNorm(norm, device=device, dtype=dtype)
        self.draws("ln_x")

    def _reset_norm(self) -> None:
        c = self.config
        nn.init.constant_(
            self.ln_x.get_parameter("weight"), ((1 + c.layer_idx) / c.num_layers) ** 0.7
        )
        nn.init.zeros_(self.ln_x.get_parameter("bias"))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, self.config.head_dim))

    def _empty(self, batch: int, like: Tensor) -> Tensor:
        c = self.config
        return like.new_zeros(batch, c.heads, c.head_dim, c.head_dim)


class RWKV5TimeMix(_HeadsTimeMix):
    """Gated linear attention with a constant decay per channel and a bonus for the current token.

    ``y = W_o (norm(o) * silu(g))`` with o of :func:`functional.rwkv6`,
    w = -exp(time_decay), u = time_faaaa, and r, k, v, g linear in x_t and x_{t-1}.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; time_decay and time_faaaa are created in
            fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters time_decay, time_faaaa (heads, head_dim), x_k, x_v, x_r, x_g (1, 1, dim),
        receptance, key, value, gate, output, ln_x.

    Reference:
        Peng et al., Eagle and Finch, 2024, arXiv 2404.05892.

    Example:
        >>> RWKV5TimeMix(8, head_dim=4)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    parts = "kvrg"

    @dataclass(frozen=True)
    class Config(RWKVHeadsConfig):
        """Sizes and options, as in RWKVHeadsConfig."""

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        _add_decay_and_bonus(self, (c.heads, c.head_dim), device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as BlinkDL's code does."""
        reset_old_shifts(self)
        _reset_decay_and_bonus(self)

    def _recur(
        self,
        x: Tensor,
        difference: Tensor,
        inputs: list[Tensor],
        shared: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        return _read_with_bonus(self, inputs, -self.time_decay.exp(), **options)


class RWKV6TimeMix(_HeadsTimeMix):
    """RWKV-5 with data-dependent decays and token shifts.

    ``w = -exp(time_decay + tanh(x_w A) B)``; the inputs of the parts are
    ``x_t + (x_{t-1} - x_t) * (mu + tanh(x_x W_1) W_2)``; otherwise as RWKV5TimeMix.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; time_decay and time_faaaa are created in
            fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters time_maa_x, time_maa_w, time_maa_k, time_maa_v, time_maa_r, time_maa_g (1, 1,
        dim), time_maa_w1 (dim, 5 mix_rank), time_maa_w2 (5, mix_rank, dim), time_decay (1, 1, dim),
        time_decay_w1 (dim, decay_rank), time_decay_w2 (decay_rank, dim), time_faaaa (heads,
        head_dim), receptance, key, value, gate, output, ln_x: names and shapes as in BlinkDL's
        code.

    Reference:
        Peng et al., Eagle and Finch, 2024, arXiv 2404.05892.

    Example:
        >>> RWKV6TimeMix(8, head_dim=4)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    parts, prefix = "xwkvrg", "time_maa_"

    @dataclass(frozen=True)
    class Config(RWKVHeadsConfig):
        """Sizes and options, as in RWKVHeadsConfig.

        Args:
            mix_rank, decay_rank: inner widths of the low-rank projections W_1 W_2 and A B.
        """

        mix_rank: Size = 32
        decay_rank: Size = 64

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        _add_decay_and_bonus(self, (1, 1, c.dim), device, dtype)
        for name, sizes in (
            ("time_maa_w1", (c.dim, 5 * c.mix_rank)),
            ("time_maa_w2", (5, c.mix_rank, c.dim)),
            ("time_decay_w1", (c.dim, c.decay_rank)),
            ("time_decay_w2", (c.decay_rank, c.dim)),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(sizes, **factory)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as BlinkDL's code does."""
        reset_old_shifts(self)
        _reset_decay_and_bonus(self)
        for weights in ("time_maa", "time_decay"):
            nn.init.zeros_(self.get_parameter(f"{weights}_w1"))
            nn.init.uniform_(self.get_parameter(f"{weights}_w2"), -0.01, 0.01)

    def _recur(
        self,
        x: Tensor,
        difference: Tensor,
        inputs: list[Tensor],
        shared: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        low = torch.tanh(inputs[0] @ self.time_maa_w1).unflatten(-1, (5, -1))
        more = torch.einsum("btpr,prd->pbtd", low, self.time_maa_w2)
        # The first dimension of time_maa_w2 is w, k, v, r, g.
        inputs = [torch.addcmul(y, difference, m) for y, m in zip(inputs[1:], more, strict=True)]
        decay = torch.tanh(inputs[0] @ self.time_decay_w1) @ self.time_decay_w2
        w = -self._heads(decay.to(self.time_decay.dtype) + self.time_decay).exp()
        return _read_with_bonus(self, inputs[1:], w, **options)


def _add_decay_and_bonus(
    layer: _HeadsTimeMix, of_decay: tuple[int, ...], device: Device, dtype: torch.dtype | None
) -> None:
    c = layer.config
    layer.add_module("gate", linear_of(c, c.dim, c.dim, device=device, dtype=dtype))
    for name, shape in (("time_decay", of_decay), ("time_faaaa", (c.heads, c.head_dim))):
        like = torch.empty(shape, device=device, dtype=fp32(dtype))
        layer.register_parameter(name, nn.Parameter(like))
    layer.register_load_state_dict_pre_hook(_reshape_decay)


def _reshape_decay(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accepts time_decay as (1, 1, dim) and, from old checkpoints of ours, (heads, head_dim)."""
    decay, like = state_dict.get(f"{prefix}time_decay"), layer.get_parameter("time_decay")
    if decay is not None and decay.shape in ((1, 1, like.numel()), layer.time_faaaa.shape):
        state_dict[f"{prefix}time_decay"] = decay.view_as(like)


def _drop_unused(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drops v0, v1 and v2, which RWKV-LM saves with the first layer of RWKV-7 and never reads."""
    for name in ("v0", "v1", "v2"):
        state_dict.pop(prefix + name, None)


def _reset_decay_and_bonus(layer: _HeadsTimeMix) -> None:
    c, n = layer.config, ramp(layer.config.dim, last=True)
    decay = -6 + 5 * n ** (0.7 + 1.3 * c.depth)
    layer.get_parameter("time_decay").copy_(decay.view_as(layer.time_decay))
    bonus = c.depth * (1 - n) + 0.1 * zigzag(c.dim)
    layer.get_parameter("time_faaaa").copy_(bonus.view(c.heads, c.head_dim))
    layer._reset_norm()


def _read_with_bonus(
    layer: Any, inputs: list[Tensor], w: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Computes W_o (norm(o) * silu(g)) from the inputs of k, v, r and g."""
    names = ("key", "value", "receptance")
    k, v, r = (layer._heads(getattr(layer, n)(y)) for n, y in zip(names, inputs, strict=False))
    o, wkv = functional.rwkv6(r, k, v, w, layer.time_faaaa, **options)
    return layer.output(layer.ln_x(o.flatten(-2)) * nnf.silu(layer.gate(inputs[3]))), wkv


class RWKV7TimeMix(_HeadsTimeMix):
    """Delta rule with a decay and a learning rate per channel.

    ``y = W_o ((norm(o) + (sum over a head of r * k * r_k) v) * g)`` with o of
    :func:`functional.rwkv7`. The state forgets along kk, which is k k_k scaled to unit length. The
    log decay is ``w = -exp(-1/2) sigmoid(w0 + tanh(x_w w1) w2)``, the learning rate
    ``alpha = sigmoid(a0 + x_a a1 a2)``; k is multiplied by 1 + (alpha - 1) k_a, and
    ``g = sigmoid(x_g g1) g2``. Layers after the first interpolate v towards the first layer's
    values by ``sigmoid(v0 + x_v v1 v2)``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters x_r, x_w, x_k, x_v, x_a, x_g, w0, a0, v0, k_k, k_a (1, 1, dim), w1, a1, v1, g1
        (dim, rank), w2, a2, v2, g2 (rank, dim), r_k (heads, head_dim), receptance, key, value,
        output, ln_x: names and shapes as in BlinkDL's code. The first layer has no v0, v1, v2.

    Reference:
        Peng et al., RWKV-7 "Goose", 2025, arXiv 2503.14456.

    Example:
        >>> RWKV7TimeMix(8, head_dim=4)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    parts = "rwkvag"
    shares = True

    @dataclass(frozen=True)
    class Config(RWKVHeadsConfig):
        """Sizes and options, as in RWKVHeadsConfig.

        Args:
            decay_rank, a_rank, v_rank, gate_rank: inner widths; default: multiples of 32,
                proportional to sqrt(dim).
        """

        decay_rank: Size | None = None
        a_rank: Size | None = None
        v_rank: Size | None = None
        gate_rank: Size | None = None

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.draws("receptance", "key", "value", "output")
        c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        ranks = {
            "w": c.decay_rank or rank_of(2.5, c.dim),
            "a": c.a_rank or rank_of(2.5, c.dim),
            "v": c.v_rank or rank_of(1.7, c.dim),
            "g": c.gate_rank or rank_of(5, c.dim),
        }
        if c.layer_idx == 0:
            del ranks["v"]
            self.register_load_state_dict_pre_hook(_drop_unused)
        sizes = {"k_k": (1, 1, c.dim), "k_a": (1, 1, c.dim), "r_k": (c.heads, c.head_dim)}
        for part, rank in ranks.items():
            sizes |= {f"{part}1": (c.dim, rank), f"{part}2": (rank, c.dim)}
            sizes |= {} if part == "g" else {f"{part}0": (1, 1, c.dim)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, **factory)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as BlinkDL's code does."""
        c = self.config
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for part, power in powers.items():
            self.get_parameter(f"x_{part}").copy_(1 - ramp(c.dim) ** (power * c.height))
        line = ramp(c.dim, last=True)
        # torch.device("meta") does not reach linspace after transformers has replaced it.
        within = torch.linspace(-1, 1, c.head_dim, device=line.device).repeat(c.heads)
        curve = within * within.abs()
        self.w0.copy_(-5.5 + 6 * line ** (1 + c.depth**0.3) + 2.5 * curve)
        self.a0.copy_(-0.19 + 0.3 * curve + 0.4 * (line - 0.5))
        if c.layer_idx > 0:
            self.v0.copy_(0.73 - 0.4 * (line - 0.5))
        for part in "wavg" if c.layer_idx > 0 else "wag":
            nn.init.zeros_(self.get_parameter(f"{part}1"))
            up = self.get_parameter(f"{part}2")
            wide = torch.empty(up.shape, device=up.device)  # QR has no 16-bit form
            gain = max(up.shape[0] / up.shape[1], 1.0) ** 0.5
            up.copy_(nn.init.orthogonal_(wide, 0.1 * gain))
        self.k_k.copy_(0.71 - 0.1 * (line - 0.5))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        for name, bound in (("receptance", 0.5), ("key", 0.05), ("value", 0.5), ("output", 0.0)):
            bound *= c.dim**-0.5
            nn.init.uniform_(self.get_parameter(f"{name}.weight"), -bound, bound)
        self._reset_norm()

    def _recur(
        self,
        x: Tensor,
        difference: Tensor,
        inputs: list[Tensor],
        shared: dict[str, Tensor] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        xr, xw, xk, xv, xa, xg = inputs
        r, k, v = self.receptance(xr), self.key(xk), self._values(xv, shared)
        wide = fp32(x.dtype)
        decay = (self.w0 + torch.tanh(xw @ self.w1) @ self.w2).to(wide).sigmoid()
        alpha = torch.sigmoid(self.a0 + xa @ self.a1 @ self.a2)
        kk = nnf.normalize(self._heads(k * self.k_k), dim=-1)
        k = k * (1 + (alpha - 1) * self.k_a)
        r, k, v, alpha, decay = (self._heads(t) for t in (r, k, v, alpha, decay))
        o, wkv = functional.rwkv7(
            r,
            decay * -(torch.e**-0.5),
            k,
            v,
            -kk,
            kk * alpha,
            **options,
        )
        y = self.ln_x(o.flatten(-2)) + ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(-2)
        return self.output(y * (torch.sigmoid(xg @ self.g1) @ self.g2)), wkv

    @property
    def publishes(self) -> tuple[str, ...]:
        return () if self.config.layer_idx else (_FIRST_VALUES,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (_FIRST_VALUES,) if self.config.layer_idx else ()

    def _values(self, xv: Tensor, shared: dict[str, Tensor] | None) -> Tensor:
        v: Tensor = self.value(xv)
        if self.config.layer_idx == 0:
            if shared is not None:
                shared[_FIRST_VALUES] = v
            return v
        if shared is None or _FIRST_VALUES not in shared:
            raise ValueError(
                f"RWKV7TimeMix: shared must hold the values v_first of the first layer, as a model "
                f"passes them on, in layer_idx={self.config.layer_idx}, "
                f"got shared={shown(shared and sorted(shared))}"
            )
        return v + (shared[_FIRST_VALUES] - v) * torch.sigmoid(self.v0 + xv @ self.v1 @ self.v2)
