"""RWKV-6 and RWKV-7 of `fla.layers`, with the names of their low-rank maps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice
from omniattn.compat._fla.conv import token_shift
from omniattn.compat._fla.linear import chunk_rwkv6, chunk_rwkv7
from omniattn.compat._fla.norms import GroupNorm
from omniattn.compat._fla.parts import l2norm
from omniattn.compat.fla_layers.base import (
    ACT2FN,
    Layer,
    RecurrentLayer,
    get_layer_cache,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from omniattn.modules.rwkv._initial import ramp, rank_of

_MAPS: dict[str, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}
#: The strongest log-decay of RWKV-7, -exp(-1/2).
_LOWEST = -(math.e**-0.5)


class LoRA(nn.Module):
    """Two linear maps through a narrow width, with a function between them.

    Args:
        input_dim, output_dim, low_rank_dim: widths.
        bias: False for none after the second map.
        activation: "tanh", "sigmoid", "relu" or None.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        low_rank_dim: int,
        bias: bool | None = True,
        activation: str | None = "tanh",
    ) -> None:
        super().__init__()
        if activation is not None:
            require_choice("LoRA", "activation", activation, _MAPS)
        self.bias = bool(bias)
        self.lora = nn.Sequential(
            nn.Linear(input_dim, low_rank_dim, bias=False),
            nn.Identity() if activation is None else _MAPS[activation](),
            nn.Linear(low_rank_dim, output_dim, bias=self.bias),
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as RWKV-LM does: the map is 0 at first, but for its bias."""
        nn.init.zeros_(self.lora.get_parameter("0.weight"))
        up = self.lora.get_parameter("2.weight")
        gain = 0.1 * max(1.0, up.shape[1] / up.shape[0]) ** 0.5
        up.copy_(nn.init.orthogonal_(torch.empty(up.shape), gain))
        if self.bias:
            nn.init.zeros_(self.lora.get_parameter("2.bias"))

    @torch.no_grad()
    def set_bias_value(self, value: Tensor | float) -> None:
        """Sets the bias, if there is one."""
        if self.bias:
            self.lora.get_parameter("2.bias").copy_(torch.as_tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lora(x)
        return y


class DDLerpLinear(nn.Module):
    """A linear map, or a :class:`LoRA`, of ``x + mu (x_before - x)`` with mu of each token.

    Args:
        input_dim, output_dim: widths.
        low_rank_dim: width of a LoRA, or None.
    """

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int | None = None) -> None:
        super().__init__()
        self.linear: nn.Module = (
            nn.Linear(input_dim, output_dim, bias=False)
            if low_rank_dim is None
            else LoRA(input_dim, output_dim, low_rank_dim)
        )

    def forward(
        self, x: Tensor, mu: Tensor, delta: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Returns the map of x (B, T, D); delta is ``token_shift(x, cu_seqlens)`` if None."""
        shift: Any = token_shift(x, cu_seqlens) if delta is None else delta
        y: Tensor = self.linear(x + shift * mu)
        return y


class LerpLinear(DDLerpLinear):
    """:class:`DDLerpLinear` with one learned mu (D,)."""

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int | None = None) -> None:
        super().__init__(input_dim, output_dim, low_rank_dim)
        self.mu = nn.Parameter(torch.zeros(input_dim))

    def forward(  # type: ignore[override]
        self, x: Tensor, delta: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, self.mu, delta, cu_seqlens)


class RWKV6Attention(RecurrentLayer):
    """RWKV-6, see :func:`functional.rwkv6`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size, expand_k, expand_v, num_heads: as in :class:`GatedLinearAttention`.
        gate_fn: function of the gate of the outputs.
        proj_low_rank_dim, gate_low_rank_dim: widths of the maps of the mixing and of the decays.
        fuse_norm: has no effect.
        elementwise_affine, norm_eps: norm of the outputs.
        layer_idx: number of the layer, for a cache.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        gate_fn: str = "swish",
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        fuse_norm: bool = True,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        require_choice("RWKV6Attention", "gate_fn", gate_fn, ACT2FN)
        rank, width = proj_low_rank_dim, hidden_size
        self.proj_low_rank_dim, self.gate_low_rank_dim = rank, gate_low_rank_dim
        self.x_proj = nn.Sequential(
            LerpLinear(width, 5 * rank), nn.Tanh(), nn.Linear(5 * rank, width, bias=False)
        )
        self.x_bias = nn.Parameter(torch.zeros(5, width))
        self.r_proj = DDLerpLinear(width, self.key_dim)
        self.w_proj = DDLerpLinear(width, self.key_dim, gate_low_rank_dim)
        self.k_proj = DDLerpLinear(width, self.key_dim)
        self.v_proj = DDLerpLinear(width, self.value_dim)
        self.g_proj = DDLerpLinear(width, self.value_dim)
        self.bonus = nn.Parameter(torch.zeros(num_heads, self.head_k_dim))
        affine = bool(elementwise_affine)
        self.g_norm = GroupNorm(num_heads, self.value_dim, affine, bias=True, eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, width, bias=False)
        self.gate_fn = ACT2FN[gate_fn]
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and ".lora." not in name:
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)

    def _convolved(
        self, x: Tensor, state: dict[str, Any] | None, use_cache: bool | None, **options: Any
    ) -> tuple[list[Tensor], Any]:
        """Returns the differences to the tokens before, and the last tokens."""
        before = None if state is None else state["conv_state"]
        delta, last = token_shift(x, options["cu_seqlens"], before, output_cache=True)
        return [delta], last

    def _mix(
        self, x: Tensor, projected: list[Tensor], sequences: dict[str, Any], **given: Any
    ) -> tuple[Tensor, Any]:
        delta = projected[0]
        low = torch.tanh(self.x_proj[0](x, delta)).unflatten(-1, (5, -1))
        up = self.x_proj.get_parameter("2.weight").unflatten(-1, (5, -1))
        mus = (torch.einsum("btnr,hnr->btnh", low, up) + self.x_bias).unbind(-2)
        layers = self.r_proj, self.w_proj, self.k_proj, self.v_proj, self.g_proj
        r, w, k, v, g = (layer(x, mu, delta) for layer, mu in zip(layers, mus, strict=True))
        r, w, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (r, w, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        o, recurrent = chunk_rwkv6(r, k, v, -w.exp(), self.bonus, scale=1.0, **sequences)
        return self.o_proj(self.g_norm(o.flatten(-2)) * self.gate_fn(g)), recurrent


class RWKV7Attention(Layer):
    """RWKV-7, see :func:`functional.rwkv7`.

    Args:
        mode: "chunk" or "fused_recurrent"; has no effect.
        hidden_size: width of x and y.
        head_dim: width of a head, or None for hidden_size / num_heads.
        num_heads: number of heads, if there is no head_dim.
        decay_low_rank_dim, gate_low_rank_dim, a_low_rank_dim, v_low_rank_dim: widths of the maps of
            decays, gates, learning rates and of the share of the first layer's values; None for
            RWKV-LM's.
        elementwise_affine, norm_eps: norm of the outputs, with head_dim norm_eps.
        layer_idx: number of the layer, for a cache; 0 for the layer whose values all read.
        fuse_norm: True for a norm and keys of unit length with other epsilons.
        value_dim: width of the values, or None for hidden_size.
        num_hidden_layers: number of layers, for initial values; None for those of the first layer.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        fuse_norm: bool = False,
        value_dim: int | None = None,
        num_hidden_layers: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        if head_dim is None and num_heads is None:
            raise ValueError("RWKV7Attention: head_dim or num_heads must be given, got None")
        if head_dim is None:
            head_dim = hidden_size // (num_heads or 1)
        self.head_dim, self.hidden_size, self.key_dim = head_dim, hidden_size, hidden_size
        self.value_dim = hidden_size if value_dim is None else value_dim
        if head_dim < 1 or hidden_size % head_dim or self.value_dim % (hidden_size // head_dim):
            raise ValueError(
                "RWKV7Attention: head_dim must divide hidden_size, and the number of heads "
                f"value_dim, got {head_dim=}, {hidden_size=}, value_dim={self.value_dim}"
            )
        self.num_heads = hidden_size // head_dim
        self.head_v_dim = self.value_dim // self.num_heads
        self.fuse_norm, self.num_hidden_layers = fuse_norm, num_hidden_layers
        factor = head_dim / 64
        self.decay_low_rank_dim = decay_low_rank_dim or rank_of(2.5 * factor, hidden_size)
        self.gate_low_rank_dim = gate_low_rank_dim or rank_of(5, hidden_size)
        self.a_low_rank_dim = a_low_rank_dim or rank_of(2.5 * factor, hidden_size)
        self.v_low_rank_dim = v_low_rank_dim or rank_of(1.7 * factor, hidden_size)
        keys, values = self.key_dim, self.value_dim
        for part in "rwkvag":
            setattr(self, f"x_{part}", nn.Parameter(torch.zeros(1, 1, hidden_size)))
        self.k_k, self.k_a = nn.Parameter(torch.zeros(keys)), nn.Parameter(torch.zeros(keys))
        self.r_k = nn.Parameter(torch.zeros(self.num_heads, head_dim))
        self.r_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.w_lora = LoRA(hidden_size, keys, self.decay_low_rank_dim)
        if layer_idx != 0:
            self.v_lora = LoRA(hidden_size, values, self.v_low_rank_dim, activation=None)
        self.a_lora = LoRA(hidden_size, keys, self.a_low_rank_dim, activation=None)
        gate = self.gate_low_rank_dim
        self.g_lora = LoRA(hidden_size, values, gate, bias=False, activation="sigmoid")
        affine, eps = bool(elementwise_affine), head_dim * norm_eps
        self.g_norm = (
            GroupNorm(self.num_heads, values, affine, bias=True, eps=eps)
            if fuse_norm
            else nn.GroupNorm(self.num_heads, values, eps, affine)
        )
        if layer_idx is not None:
            self._initialise(layer_idx, num_hidden_layers or layer_idx + 1)

    @torch.no_grad()
    def _initialise(self, layer: int, layers: int) -> None:
        """Gives parameters the initial values of RWKV-LM."""
        depth, height = layer / max(layers - 1, 1), 1 - layer / layers
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for part, power in powers.items():
            mu = 1 - ramp(self.hidden_size) ** (power * height)
            self.get_parameter(f"x_{part}").copy_(mu)
        line = ramp(self.hidden_size, last=True)
        within = torch.linspace(-1, 1, self.head_dim, dtype=line.dtype).repeat(self.num_heads)
        curve = within * within.abs()
        self.w_lora.set_bias_value(-5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * curve)
        self.a_lora.set_bias_value(-0.19 + 0.3 * curve + 0.4 * (line - 0.5))
        if layer > 0 and self.value_dim == self.hidden_size:
            self.v_lora.set_bias_value(0.73 - 0.4 * (line - 0.5))
        self.k_k.copy_(0.71 - 0.1 * (line - 0.5))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        if self.g_norm.weight is not None:
            nn.init.constant_(self.g_norm.get_parameter("weight"), ((layer + 1) / layers) ** 0.7)
        for linear, gain in ((self.r_proj, 1.0), (self.k_proj, 0.1), (self.v_proj, 1.0)):
            nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(self.o_proj.weight)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        v_first: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any, Tensor | None]:
        """Returns y, None, the cache and the values of the first layer, `v_first` of the others."""
        batch, tokens = self._checked(hidden_states, attention_mask)
        if v_first is None and self.layer_idx != 0:
            raise ValueError(
                "RWKV7Attention: v_first must be given to layers after the first, got v_first=None "
                f"in layer_idx={self.layer_idx}"
            )
        state = get_layer_cache(self, past_key_values)
        padding = cu_seqlens, attention_mask, tokens
        x, indices, cu = unpad_hidden_states(hidden_states, *padding)
        first: Any = None if v_first is None else unpad_hidden_states(v_first, *padding)[0]
        before, matrix = (None, None) if state is None else (
            state["conv_state"], state["recurrent_state"]
        )  # fmt: skip
        delta, last = token_shift(x, cu, before, output_cache=True)
        mus = (getattr(self, f"x_{part}") for part in "rwkvag")
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, mu) for mu in mus)
        v = self.v_proj(xv)
        if self.layer_idx == 0:
            v_first = repad_hidden_states(v, indices, batch, tokens)
        else:
            v = torch.lerp(v, first, self.v_lora(xv).sigmoid())
        y, matrix = self._read(
            self.r_proj(xr), self.w_lora(xw), self.k_proj(xk), v, self.a_lora(xa).sigmoid(),
            self.g_lora(xg), initial_state=matrix, output_final_state=bool(use_cache),
            cu_seqlens=cu,
        )  # fmt: skip
        states = {"recurrent_state": matrix, "conv_state": last}
        update_layer_cache(self, past_key_values, **states, offset=tokens)
        return repad_hidden_states(y, indices, batch, tokens), None, past_key_values, v_first

    def _read(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y and the state; w is the logit of decays, a the learning rate."""
        erased = (k * self.k_k).unflatten(-1, (-1, self.head_dim))
        erased = l2norm(erased) if self.fuse_norm else nnf.normalize(erased, dim=-1)
        k = k + k * (a - 1) * self.k_a
        w = _LOWEST * w.sigmoid()
        r, w, k, a = (t.unflatten(-1, (-1, self.head_dim)) for t in (r, w, k, a))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        o, matrix = chunk_rwkv7(r, w, k, v, -erased, erased * a, **options)
        rows = self.g_norm(o.flatten(2).flatten(0, 1)).view(*o.shape[:2], -1)
        own = ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(-2)
        return self.o_proj((rows + own) * g), matrix
