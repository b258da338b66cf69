"""Zamba2: Mamba-2 with a few transformer blocks shared by all hybrid layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import widen
from omniattn.functional.masks import Mask
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.modules import (
    Cache,
    DecoderBlock,
    Dropout,
    Linear,
    Mamba2,
    RMSNorm,
    RotaryEmbedding,
    State,
)
from omniattn.modules.base.fields import Epsilon, Positive, Size
from omniattn.modules.base.state import Stateful, StatePair, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import require_cache, with_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SharedTransformer(nn.Module, Stateful):
    """A transformer block without residuals, shared by several hybrid layers.

    Computes ``t = W_d (gelu(g) * u)`` with ``[g, u] = W_gu norm(W_o attention(norm([h, e])))``,
    where e are the token embeddings. Use i adds a low-rank ``B_i A_i x`` to ``W_gu x``, and with
    `adapt_attention` to the queries, keys and values.

    Args:
        config: sizes and options.
        uses: indices, among all hybrid layers, of those that use this block.
        factory: device and dtype of the parameters.
    """

    def __init__(self, config: Any, uses: Iterable[int], **factory: Any) -> None:
        super().__init__()
        self.config = c = config
        wide = 2 * c.dim

        def linear(n_in: int, n_out: int, bias: bool = False) -> Linear:
            return Linear(n_in, n_out, bias, c.init_std, c.backend, **factory)

        def adapters(n_in: int, n_out: int) -> nn.ModuleDict:
            pairs = {
                str(use): nn.Sequential(linear(n_in, c.adapter_rank), linear(c.adapter_rank, n_out))
                for use in uses
            }
            return nn.ModuleDict(pairs)

        kv_dim = c.num_kv_heads * c.head_dim
        self.input_layernorm = RMSNorm(wide, c.norm_eps, backend=c.backend, **factory)
        self.q_proj = linear(wide, wide)
        self.k_proj = linear(wide, kv_dim)
        self.v_proj = linear(wide, kv_dim)
        self.o_proj = linear(wide, c.dim)
        if c.adapt_attention:
            self.q_adapters = adapters(wide, wide)
            self.k_adapters = adapters(wide, kv_dim)
            self.v_adapters = adapters(wide, kv_dim)
        self.pre_ff_layernorm = RMSNorm(c.dim, c.norm_eps, backend=c.backend, **factory)
        self.gate_up_proj = linear(c.dim, 2 * c.hidden_dim, c.bias)
        if c.adapter_rank:
            self.gate_up_adapters = adapters(c.dim, 2 * c.hidden_dim)
        self.down_proj = linear(c.hidden_dim, c.dim, c.bias)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Returns an empty cache for one use."""
        c = self.config
        sizes = (batch, max_length, c.num_kv_heads, c.head_dim)
        return new.keys_and_values(self, self.k_proj.weight, *sizes, **storage)

    def _adapted(self, name: str, x: Tensor, use: int) -> Tensor:
        """Computes ``W x + B_i A_i x``."""
        y: Tensor = self.get_submodule(f"{name}_proj")(x)
        adapters = self._modules.get(f"{name}_adapters")
        return y if adapters is None else y + adapters.get_submodule(str(use))(x)

    def forward(
        self,
        h: Tensor,
        embeddings: Tensor,
        use: int,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps h, embeddings (B, T, dim) to t (B, T, dim); `state` belongs to this use."""
        c = self.config
        cache = require_cache("SharedTransformer", state)
        x = self.input_layernorm(torch.cat([h, embeddings], -1))
        q, k, v = (
            self._adapted(name, x, use).unflatten(-1, (-1, c.head_dim)) for name in ("q", "k", "v")
        )
        if rope is not None:
            q, k = functional.apply_rotary(q, k, *rope, backend=c.backend)
        if cache is not None:
            k, v = cache.append(k, v)
        out = functional.attention(
            q,
            k,
            v,
            causal=True,
            mask=mask if cache is None else with_cache(cache, mask),
            scale=(c.head_dim / 2) ** -0.5,
            backend=c.backend,
        )
        x = self.pre_ff_layernorm(self.o_proj(out.flatten(-2)))
        x = functional.geglu(self._adapted("gate_up", x, use), backend=c.backend)
        return self.down_proj(x)


class HybridBlock(nn.Module, Stateful):
    """Computes ``h + mixer(norm(h + W t))`` with t of a shared transformer.

    Args:
        config: config of the block around the mixer.
        transformer: module that computes t; owned by the model, not by the block.
        use: index of this use of the transformer.
        factory: device and dtype of the parameters.
    """

    def __init__(
        self, config: DecoderBlock.Config, transformer: SharedTransformer, use: int, **factory: Any
    ) -> None:
        super().__init__()
        self.config = config
        c = transformer.config
        self.linear = Linear(c.dim, c.dim, False, c.init_std, c.backend, **factory)
        self.input_layernorm = config.norm.build(**factory)
        self.mixer = config.mixer.build(**factory)
        self.dropout = Dropout(config.dropout_p)
        self.use = use
        self._shared = (transformer,)  # a tuple, so that it does not become a submodule

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> StatePair:
        """Returns the mixer's state and the shared transformer's cache."""
        mixer = self.mixer.new_state(batch, max_length, **storage)
        return StatePair(mixer, self._shared[0].new_state(batch, max_length, **storage))

    @takes_cache
    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        state: StatePair | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        shared: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Computes the block as DecoderBlock does; `shared` holds the token embeddings."""
        h = x if residual is None else x + residual
        if residual is None and self.config.residual_in_fp32:
            h = widen(x)
        mixer, cache = (None, None) if state is None else (state.mixer, state.mlp)
        (transformer,) = self._shared
        embeddings, given = shared["embeddings"], {"rope": rope, "mask": mask}
        t = transformer(h.to(x.dtype), embeddings, self.use, state=cache, **given)
        y, _ = self.input_layernorm(self.linear(t), h)
        return self.dropout(self.mixer(y, state=mixer, mask=mask)), h


class Zamba2(Decoder):
    """The shared decoder with a Zamba2Config, or the ZambaConfig of its predecessor.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> config = Zamba2Config(dim=48, num_layers=2, hybrid_layers=(1,), headdim=32)
        >>> Zamba2(config)(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    config: Any

    def _blocks(self, **factory: Any) -> Iterable[nn.Module]:
        c = self.config
        count = len(c.hybrid_layers)
        self.transformers = nn.ModuleList(
            SharedTransformer(c, range(first, count, c.num_transformers), **factory)
            for first in range(c.num_transformers)
        )
        uses = {layer: use for use, layer in enumerate(c.hybrid_layers)}
        for layer in range(c.num_layers):
            if layer not in uses:
                yield DecoderBlock(c.block(layer), **factory)
                continue
            use = uses[layer]
            transformer = cast(SharedTransformer, self.transformers[use % c.num_transformers])
            yield HybridBlock(c.block(layer), transformer, use, **factory)


def check_wiring(c: Any) -> None:
    """Raises if the hybrid layers or the heads of a Zamba are invalid."""
    op = type(c).__name__
    layers = c.hybrid_layers
    if list(layers) != sorted({layer for layer in layers if 0 <= layer < c.num_layers}):
        raise ValueError(
            f"{op}: hybrid_layers must rise within [0, num_layers={c.num_layers}), "
            f"got hybrid_layers={layers}"
        )
    if not 1 <= c.num_transformers <= len(layers):
        raise ValueError(
            f"{op}: num_transformers must be in [1, number of hybrid_layers], got "
            f"num_transformers={c.num_transformers}, hybrid_layers={layers}"
        )
    if 2 * c.dim % c.num_heads:
        raise ValueError(
            f"{op}: 2 dim must be a multiple of num_heads, got dim={c.dim}, num_heads={c.num_heads}"
        )
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"{op}: num_heads must be a multiple of num_kv_heads, got "
            f"num_heads={c.num_heads}, num_kv_heads={c.num_kv_heads}"
        )


def layers_to_hf(ours: Any) -> dict[str, Any]:
    op = type(ours).__name__
    if not ours.tie_embeddings:
        raise NotImplementedError(
            f"{op}: tie_embeddings must be True in transformers, which shares the "
            "transformers only then, got tie_embeddings=False"
        )
    if ours.adapt_attention and ours.num_kv_heads != ours.num_heads:
        raise NotImplementedError(
            f"{op}: num_kv_heads must be num_heads where transformers adapts the attention, "
            f"got num_kv_heads={ours.num_kv_heads}, num_heads={ours.num_heads}"
        )
    kinds = ["linear_attention"] * ours.num_layers
    for layer in ours.hybrid_layers:
        kinds[layer] = "hybrid"
    return {"layers_block_type": kinds}


def rope_to_hf(ours: Zamba2Config) -> dict[str, Any]:
    base = 10000.0 if ours.rope_base is None else ours.rope_base
    rope = {"rope_type": "default", "rope_theta": base}
    return {"use_mem_rope": ours.rope_base is not None, "rope_parameters": rope}


def rope_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    rope = theirs.rope_parameters
    if not theirs.use_mem_rope:
        return {"rope_base": None}
    if rope["rope_type"] != "default":
        raise NotImplementedError(
            f"Zamba2Config: rope_type must be 'default', got rope_type={rope['rope_type']!r}"
        )
    return {"rope_base": rope["rope_theta"]}


def hybrid_weights(c: Any, shared: str) -> Renames:
    """Returns the names of weights that depend on which layers are hybrid."""

    def transformer(match: re.Match[str]) -> str:
        return f"layers.{c.hybrid_layers[int(match[1])]}.{shared}"

    def block(match: re.Match[str]) -> str:
        hybrid = int(match[1]) in c.hybrid_layers
        return f"layers.{match[1]}.{'mamba_decoder.' if hybrid else ''}{match[2]}"

    return (
        (r"layers\.(\d+)\.(mixer|input_layernorm)", block),
        (r"transformers\.(\d+)", transformer),
    )


@dataclass(frozen=True)
class Zamba2Config(Decoder.Config):
    """Sizes and options of a Zamba2.

    Args:
        hybrid_layers: layers that add the output of a shared transformer to their Mamba-2's input;
            the other layers are Mamba-2 only.
        num_transformers: number of shared transformers, used by the hybrid layers in turn.
        num_heads, num_kv_heads, hidden_dim: sizes of the shared transformers, whose heads have the
            size 2 dim / num_heads.
        adapter_rank: rank of the low-rank adapter of each use of a shared transformer.
        adapt_attention: True if the query, key and value projections have adapters, too.
        rope_base: base of the shared transformers' rotary embedding; None for none.
        d_state, d_conv, expand, headdim, ngroups: as in :class:`omniattn.modules.Mamba2`.
        dt_min: lower bound of dt.
        bias: True if the projections of Mamba-2 and of the feed-forward layers have biases.
        norm_eps: epsilon of all norms except the gated one, which has 1e-5.
        tie_embeddings: the head shares the embedding's weight; True by default.

    Reference:
        Glorioso et al., "The Zamba2 Suite", 2024, arXiv 2411.15242; the wiring: Glorioso et al.,
        "Zamba: A Compact 7B SSM Hybrid Model", 2024, arXiv 2405.16712.
    """

    architecture = "zamba2"
    hf = Counterpart(
        "Zamba2ForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_transformers": "num_mem_blocks",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "hidden_dim": "intermediate_size",
            "adapter_rank": "adapter_rank",
            "adapt_attention": "use_shared_attention_adapter",
            "d_state": "mamba_d_state",
            "d_conv": "mamba_d_conv",
            "expand": "mamba_expand",
            "headdim": "mamba_headdim",
            "ngroups": "mamba_ngroups",
            "dt_min": "time_step_min",
            "bias": "add_bias_linear",
            "norm_eps": "rms_norm_eps",
            "init_std": "initializer_range",
        },
        (
            (r"^norm", "final_layernorm"),
            (r"^(?!lm_head)", "model."),
            (r"gate_up_adapters", "feed_forward.gate_up_proj_adapter_list"),
            (r"([qkv])_adapters", r"self_attn.linear_\1_adapter_list"),
            (r"([qkvo]_proj)", r"self_attn.\1"),
            (r"(gate_up_proj|down_proj)\.", r"feed_forward.\1."),
            (r"\.mixer", ".mamba"),
        ),
        fixed={
            "hidden_act": "gelu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_conv_bias": True,
            "use_long_context": False,
            "n_mamba_heads": lambda c: c.expand * c.dim // c.headdim,
        },
        conversions=(
            Conversion(layers_to_hf, lambda theirs: {"hybrid_layers": theirs.hybrid_layer_ids}),
            Conversion(rope_to_hf, rope_from_hf),
        ),
    )

    tie_embeddings: bool = True
    hybrid_layers: tuple[int, ...] = (1, 3)
    num_transformers: int = 1
    num_heads: Size = 6
    num_kv_heads: Size = 6
    hidden_dim: Size = 512
    adapter_rank: Size = 16
    adapt_attention: bool = False
    rope_base: Positive | None = None
    d_state: int = 64
    d_conv: int = 4
    expand: int = 2
    headdim: Size = 48
    ngroups: Size = 1
    dt_min: float = 1e-3
    bias: bool = False
    norm_eps: Epsilon = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wiring(self)

    @property
    def head_dim(self) -> int:
        """Head size of the shared transformers."""
        return 2 * self.dim // self.num_heads

    @property
    def counterpart(self) -> Counterpart:
        """Returns `hf` with the weight names that depend on which layers are hybrid."""

        own = hybrid_weights(self, "shared_transformer")
        return replace(self.hf, weights=(*own, *self.hf.weights))

    @property
    def rope(self) -> RotaryEmbedding.Config | None:
        return (
            None
            if self.rope_base is None
            else RotaryEmbedding.Config(self.head_dim, self.rope_base)
        )

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    def block(self, layer: int) -> DecoderBlock.Config:
        mixer = Mamba2.Config(
            self.dim,
            self.d_state,
            self.d_conv,
            self.expand,
            self.headdim,
            self.ngroups,
            (self.dt_min, math.inf),
            self.bias,
            init_std=self.init_std,
            backend=self.backend,
        )
        return DecoderBlock.Config(
            mixer,
            None,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Zamba2:
        return Zamba2(self, device=device, dtype=dtype)
