"""Mixture of memories: a gated delta rule with several states, to which tokens are routed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.norm import RMSNorm, RMSNormGated
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.delta_net import draw_rates
from omniattn.modules.recurrent.recurrent import (
    Device,
    RecurrentConfig,
    fp32,
    linear,
    zeros_of_states,
)
from omniattn.modules.recurrent.state_mixer import StateMixer


class MixtureOfMemories(StateMixer):
    """Gated DeltaNet with M memories, of which each token reads and writes the best top_k.

    A memory is a gated delta rule on its tokens alone, with projections of its own:
    ``S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T``, ``o_mt = S_t^T q_t / sqrt(K)``
    with ``beta = sigmoid(x W_b)``, ``ln a = -exp(A_log) softplus(x W_a + dt_bias)``, q, k and v
    ``silu(conv(x W))`` and unit q and k; ``o_t = sum_m w_tm o_mt`` over the top_k largest
    ``w = softmax(x W_r)``, divided by their sum; ``y = W_o (norm(o) * silu(x W_g))``.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; A_log and dt_bias are created in fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, gate (M, dim), g_proj, o_norm, o_proj, q_conv1d, k_conv1d, v_conv1d,
        A_log, dt_bias (H), and k_proj, v_proj, b_proj and a_proj of each memory, or shared_k,
        shared_v, shared_b and shared_a of all memories or of the shared one: names and shapes as
        in fla.

    Note:
        Tokens are sorted by memory and run as packed sequences. In training fla's convolutions read
        from one memory's tokens into the next; here they do not. A loss that balances memories, as
        in `functional.load_balance_loss`, is left to the caller.

    Reference:
        Du et al., MoM: Linear Sequence Modeling with Mixture-of-Memories, 2025, arXiv 2502.13685.
        Verified against the formula of `layers/mom.py` of fla-org/flash-linear-attention, commit
        bc3b101d.

    Example:
        >>> MixtureOfMemories(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(RecurrentConfig):
        """Sizes and options, as in RecurrentConfig; `num_v_heads` must be None.

        Args:
            num_memories: number M of memories.
            top_k: number of memories of a token.
            shared_memory: True for one more memory, which has all tokens with the weight 1.
            shared_projections: True for one k, v, beta and decay of all memories.
        """

        expand: ClassVar[int] = 2
        num_memories: Size = 8
        top_k: Size = 2
        shared_memory: bool = False
        shared_projections: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "MixtureOfMemories"
            if self.v_heads != self.num_heads:
                raise ValueError(
                    f"{op}: num_v_heads must be None, got num_v_heads={self.num_v_heads}"
                )
            if self.top_k > self.num_memories:
                raise ValueError(
                    f"{op}: top_k must be at most num_memories, got top_k={self.top_k}, "
                    f"num_memories={self.num_memories}"
                )

        @property
        def memories(self) -> int:
            """Number of memories with the shared one."""
            return self.num_memories + self.shared_memory

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = c.num_heads * c.k_size, c.num_heads * c.v_size
        self.q_proj = linear(c, c.dim, keys, **factory)
        self.gate = linear(c, c.dim, c.num_memories, **factory)
        widths = {"k": keys, "v": values, "b": c.num_heads, "a": c.num_heads}
        for name, width in widths.items():
            if not c.shared_projections:
                each = (linear(c, c.dim, width, **factory) for _ in range(c.num_memories))
                self.add_module(f"{name}_proj", nn.ModuleList(each))
            if c.shared_projections or c.shared_memory:
                self.add_module(f"shared_{name}", linear(c, c.dim, width, **factory))
        for name, width in (("q", keys), ("k", keys), ("v", values)) if c.conv_size > 0 else ():
            conv = ShortConvolution.Config(width, c.conv_size, c.conv_bias, "silu", c.backend)
            self.add_module(f"{name}_conv1d", conv.build(**factory))
        if c.gate is not None:
            self.g_proj = linear(c, c.dim, values, **factory)
            gated = RMSNormGated.Config(c.v_size, c.norm_eps, activation=c.gate, backend=c.backend)
            self.o_norm: nn.Module = gated.build(**factory)
        else:
            self.o_norm = RMSNorm.Config(c.v_size, c.norm_eps, backend=c.backend).build(**factory)
        self.o_proj = linear(c, values, c.dim, **factory)
        like = torch.empty(c.num_heads, device=device, dtype=fp32(dtype))
        self.A_log, self.dt_bias = nn.Parameter(like), nn.Parameter(like.clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws exp(A_log) from (0, 16) and softplus(dt_bias) from (1e-3, 0.1)."""
        with torch.no_grad():
            draw_rates(self.A_log, self.dt_bias, 0.0)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, M, H, K, V) in fp32 (fp64 for fp64) and those of convolutions."""
        c = self.config
        wide = zeros_of_states(self.o_proj.weight, storage)
        sizes = (batch, c.memories)
        tensors = {"s": wide.new_zeros(*sizes, c.num_heads, *c.state_size)}
        if c.conv_size > 0:
            like = wide.new_zeros(0, dtype=storage_like(self.o_proj.weight, **storage)["dtype"])
            for name in "qkv":
                states = self._conv(name).new_state(batch * c.memories, like)
                tensors[f"{name}_conv"] = states.unflatten(0, sizes)
        return RecurrentState(**tensors)

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, cu_seqlens = self.config, sequences.cu_seqlens
        batch, steps = x.shape[:2]
        tokens = x.flatten(0, 1)
        count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        places = torch.arange(len(tokens), device=x.device)
        if cu_seqlens is None:
            owner = places // max(1, steps)
        else:
            owner = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
        weights, memory = self._routed(tokens)
        # The rows of a memory follow each other, by sequence and then by time.
        group = (memory * count + owner[:, None]).flatten()
        order = group.argsort(stable=True)
        sizes = group.new_zeros(c.memories * count).scatter_add_(0, group, torch.ones_like(group))
        bounds = nnf.pad(sizes.cumsum(0), (1, 0))
        rows = tokens[order // memory.shape[1]]
        shares = self._shares(x, sizes.view(c.memories, count).sum(1))
        after: dict[str, Tensor] = {}

        def convolved(name: str, y: Tensor) -> Tensor:
            y = y[None]
            if c.conv_size == 0:
                return nnf.silu(y).unflatten(-1, (c.num_heads, -1))
            key = f"{name}_conv"
            before = None if state is None else _by_memory(state[key]).to(y.dtype)
            y, last = self._conv(name)(y, before, bounds)
            after[key] = _by_sequence(last, c.memories)
            return y.unflatten(-1, (c.num_heads, -1))

        q = convolved("q", self.q_proj(rows))
        k, v = (convolved(name, self._projected(name, rows, shares)) for name in "kv")
        wide = self.A_log.dtype
        beta = self._projected("b", rows, shares)[None].to(wide).sigmoid()
        step = nnf.softplus(self._projected("a", rows, shares)[None].to(wide) + self.dt_bias)
        o, last = functional.gated_delta_rule(
            *(q, k, v, -self.A_log.exp() * step, beta),
            l2norm=True,
            initial_state=None if state is None else _by_memory(state["s"]),
            cu_seqlens=bounds,
            backend=c.backend,
        )
        after["s"] = _by_sequence(last, c.memories)
        o = o[0][order.argsort()].unflatten(0, memory.shape)
        o = (o * weights.to(o.dtype)[..., None, None]).sum(1).unflatten(0, (batch, steps))
        normed = [o] if c.gate is None else [o, self.g_proj(x).unflatten(-1, o.shape[2:])]
        y: Tensor = self.o_proj(self.o_norm(*normed).flatten(2))
        return y, after

    def _routed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of the memories of tokens (n, dim)."""
        c = self.config
        logits: Tensor = self.gate(tokens)
        weights, memory = logits.to(fp32(logits.dtype)).softmax(-1).topk(c.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        if c.shared_memory:
            memory = nnf.pad(memory, (0, 1), value=c.num_memories)
            weights = nnf.pad(weights, (0, 1), value=1.0)
        return weights, memory

    def _shares(self, x: Tensor, sizes: Tensor) -> list[int]:
        """Returns the number of rows of each memory, equal ones where the routing is unknown."""
        c = self.config
        if c.shared_projections:
            return []
        if not is_compiling() and is_tracing():
            raise NotImplementedError(
                "MixtureOfMemories: x must not be routed under torch.jit.trace, whose programs "
                "keep the number of tokens of each memory, unless shared_projections=True"
            )
        if not x.is_meta:
            shares: list[int] = sizes.tolist()
            return shares
        rows, parts = x.shape[0] * x.shape[1] * (c.top_k + c.shared_memory), c.memories
        return [rows * (n + 1) // parts - rows * n // parts for n in range(parts)]

    def _projected(self, name: str, rows: Tensor, parts: list[int]) -> Tensor:
        """Projects rows, of which each memory has the next `parts`."""
        c = self.config
        if c.shared_projections:
            y: Tensor = self.get_submodule(f"shared_{name}")(rows)
            return y
        layers = list(cast(nn.ModuleList, self.get_submodule(f"{name}_proj")))
        if c.shared_memory:
            layers.append(self.get_submodule(f"shared_{name}"))
        pairs = zip(layers, rows.split(parts), strict=True)
        return torch.cat([layer(part) for layer, part in pairs])

    def _conv(self, name: str) -> ShortConvolution:
        return cast(ShortConvolution, self.get_submodule(f"{name}_conv1d"))


def _by_memory(t: Tensor) -> Tensor:
    """Returns states (B, M, ...) as (M * B, ...)."""
    return t.transpose(0, 1).flatten(0, 1)


def _by_sequence(t: Tensor, memories: int) -> Tensor:
    """Returns states (M * B, ...) as (B, M, ...)."""
    return t.unflatten(0, (memories, -1)).transpose(0, 1)
