"""Multi-head latent attention: keys and values are rebuilt from one small latent a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.fields import (
    Backend,
    Epsilon,
    Positive,
    Probability,
    Size,
    SizeOrZero,
    WindowSize,
)
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear, weight_of
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache


class MultiHeadLatentAttention(Mixer):
    """Attention whose cache holds a latent and one rotary key for all heads.

    ``[c | k_r] = x W_dkv``, c normed; ``[k_n | v] = c W_ukv`` for each head; queries
    ``[q_n | q_r] = norm(x W_dq) W_uq``; ``y = W_o softmax(scale (q_n k_n^T + q_r k_r^T)) v`` with
    q_r and k_r rotated. Absorbed, q_n takes up the key half of W_ukv and attention runs on the
    latents themselves, as multi-query attention with values c.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) or a jagged nested tensor -> the same. Parameters, named as in DeepSeek-V3:
        q_proj or q_a_proj, q_a_layernorm, q_b_proj; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj;
        o_proj.

    Reference:
        DeepSeek-AI, DeepSeek-V2, 2024, arXiv 2405.04434; DeepSeek-V3, 2024, arXiv 2412.19437.

    Example:
        >>> sizes = {"kv_lora_rank": 16, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_dim": 8}
        >>> config = MultiHeadLatentAttention.Config(32, 2, q_lora_rank=None, **sizes)
        >>> rope = torch.ones(5, 2), torch.zeros(5, 2)
        >>> MultiHeadLatentAttention(config)(torch.ones(1, 5, 32), rope=rope).shape
        torch.Size([1, 5, 32])
    """

    takes_score_mod = True

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: heads of queries, keys and values.
            q_lora_rank: size of the queries' latent, None for queries straight from x.
            kv_lora_rank: size of the latent c.
            qk_nope_dim, qk_rope_dim: sizes of the parts of a key without and with rotation;
                qk_rope_dim=0 leaves positions out.
            v_dim: size of a value.
            causal, window_size: as in Attention.
            rope_interleaved: rotary pairs are (2i, 2i + 1), as DeepSeek's weights have them.
            mscale: the scale is (qk_nope_dim + qk_rope_dim)^-1/2 mscale^2 (YaRN).
            latent_norm: RMSNorm on both latents.
            q_rope_from: "latent", or "x" for rotary queries from x by their own projection.
            separate_kv_latents: keys and values have a latent each.
            absorb_max: with a state, up to this many new tokens attend to the latents themselves.
            norm_eps, dropout_p, init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        q_lora_rank: Size | None
        kv_lora_rank: Size
        qk_nope_dim: SizeOrZero
        qk_rope_dim: SizeOrZero
        v_dim: Size
        causal: bool = True
        window_size: WindowSize = (-1, -1)
        rope_interleaved: bool = True
        mscale: Positive = 1.0
        latent_norm: bool = True
        q_rope_from: str = "latent"
        separate_kv_latents: bool = False
        absorb_max: int = 1
        norm_eps: Epsilon = 1e-6
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.q_rope_from not in ("latent", "x"):
                raise ValueError(
                    "MultiHeadLatentAttention: q_rope_from must be 'latent' or 'x', "
                    f"got q_rope_from={shown(self.q_rope_from)}"
                )
            if self.qk_rope_dim % 2:
                raise ValueError(
                    "MultiHeadLatentAttention: qk_rope_dim must be even, "
                    f"got qk_rope_dim={self.qk_rope_dim}"
                )

        @property
        def scale(self) -> float:
            """Factor on the scores."""
            return (self.qk_nope_dim + self.qk_rope_dim) ** -0.5 * self.mscale**2

        @property
        def rotary_dim(self) -> int:
            """Dimensions of a head that a model rotates."""
            return self.qk_rope_dim

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config

        def linear(n_in: int, n_out: int, std: float = c.init_std) -> Linear:
            config = Linear.Config(n_in, n_out, False, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        def norm(size: int) -> RMSNorm:
            config = RMSNorm.Config(size, c.norm_eps, backend=c.backend)
            return RMSNorm(config, device=device, dtype=dtype)

        q_rope_dim = c.num_heads * c.qk_rope_dim if c.q_rope_from == "x" else 0
        q_dim = c.num_heads * (c.qk_nope_dim + c.qk_rope_dim) - q_rope_dim
        if c.q_lora_rank is None:
            self.q_proj = linear(c.dim, q_dim)
        else:
            self.q_a_proj = linear(c.dim, c.q_lora_rank)
            if c.latent_norm:
                self.q_a_layernorm = norm(c.q_lora_rank)
            self.q_b_proj = linear(c.q_lora_rank, q_dim)
        if q_rope_dim:
            self.q_rope_proj = linear(c.dim, q_rope_dim)

        latents = 2 if c.separate_kv_latents else 1
        self.kv_a_proj_with_mqa = linear(c.dim, latents * c.kv_lora_rank + c.qk_rope_dim)
        if c.latent_norm:
            self.kv_a_layernorm = norm(c.kv_lora_rank)
            if c.separate_kv_latents:
                self.v_a_layernorm = norm(c.kv_lora_rank)
        if c.separate_kv_latents:
            self.k_b_proj = linear(c.kv_lora_rank, c.num_heads * c.qk_nope_dim)
            self.v_b_proj = linear(c.kv_lora_rank, c.num_heads * c.v_dim)
        else:  # for each head its key, then its value
            self.kv_b_proj = linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_dim + c.v_dim))
        self.o_proj = linear(c.num_heads * c.v_dim, c.dim, c.out_init_std)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """An empty cache of the latents."""
        c = self.config
        weight, rank = self.kv_a_proj_with_mqa.weight, c.kv_lora_rank
        if not c.separate_kv_latents:
            sizes = (batch, max_length, rank, c.qk_rope_dim)
            return new.of_latents(self, weight, *sizes, **storage)
        sizes = (batch, max_length, 1, rank + c.qk_rope_dim)
        return new.keys_and_values(self, weight, *sizes, v_head_dim=rank, **storage)

    def _rotate(self, x: Tensor, start: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, H, D) with its dimensions from `start` on rotated."""
        c = self.config
        turned, _ = functional.apply_rotary(
            x, None, *rope, rotary_start=start, interleaved=c.rope_interleaved, backend=c.backend
        )
        return turned

    def _query_latent(self, x: Tensor) -> Tensor:
        """Returns the input of the query projection: the normed latent (B, T, q_lora_rank), or
        x."""
        c = self.config
        if c.q_lora_rank is None:
            return x
        latent: Tensor = self.q_a_proj(x)
        return self.q_a_layernorm(latent) if c.latent_norm else latent

    def _queries(self, latent: Tensor, x: Tensor) -> Tensor:
        """Queries (B, T, H, qk_nope_dim + qk_rope_dim), not yet rotated."""
        c = self.config
        q = (self.q_proj if c.q_lora_rank is None else self.q_b_proj)(latent)
        q = q.unflatten(-1, (c.num_heads, -1))
        if c.q_rope_from == "x" and c.qk_rope_dim:
            q = torch.cat([q, self.q_rope_proj(x).unflatten(-1, (c.num_heads, -1))], -1)
        return q

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of keys and of values (B, T, 1, rank), the unrotated key (B, T, 1, rope_dim)."""
        c = self.config
        count = 2 if c.separate_kv_latents else 1
        parts = self.kv_a_proj_with_mqa(x)[:, :, None]
        *latents, rope = parts.split([c.kv_lora_rank] * count + [c.qk_rope_dim], -1)
        if c.latent_norm:
            latents[0] = self.kv_a_layernorm(latents[0])
            if c.separate_kv_latents:
                latents[1] = self.v_a_layernorm(latents[1])
        return latents[0], latents[-1], rope

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Weights from latents to keys (H, qk_nope_dim, rank) and values (H, v_dim, rank)."""
        c = self.config
        if c.separate_kv_latents:
            k, v = weight_of(self.k_b_proj), weight_of(self.v_b_proj)
            return k.unflatten(0, (c.num_heads, -1)), v.unflatten(0, (c.num_heads, -1))
        both = weight_of(self.kv_b_proj).unflatten(0, (c.num_heads, -1))
        k, v = both.split([c.qk_nope_dim, c.v_dim], 1)
        return k, v

    def _expand(self, k_latent: Tensor, v_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, S, rank) -> keys (B, S, H, qk_nope_dim), values (B, S, H, v_dim)."""
        c = self.config
        if c.separate_kv_latents:
            k, v = self.k_b_proj(k_latent), self.v_b_proj(v_latent)
            return k.unflatten(-1, (c.num_heads, -1)), v.unflatten(-1, (c.num_heads, -1))
        both = self.kv_b_proj(k_latent).unflatten(-1, (c.num_heads, -1))
        k, v = both.split([c.qk_nope_dim, c.v_dim], -1)
        return k, v

    def _rotated(
        self,
        q: Tensor,
        k_latent: Tensor,
        v: Tensor,
        k_rope: Tensor,
        rope: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (B, T, 1, rank + rope_dim) and values (B, T, 1, rank), rotated."""
        c = self.config
        k = torch.cat([k_latent, k_rope], -1)
        if rope is not None:
            q = self._rotate(q, c.qk_nope_dim, rope)
            k = self._rotate(k, c.kv_lora_rank, rope)
        return q, k, v

    def _to_latents(self, q: Tensor) -> Tensor:
        """Queries (B, T, H, rank + rope_dim) of the latents themselves."""
        c = self.config
        q_nope, q_rope = q.split([c.qk_nope_dim, c.qk_rope_dim], -1)
        q_nope = torch.einsum("bthd,hdr->bthr", q_nope, self._up_weights()[0])
        return torch.cat([q_nope, q_rope], -1)

    def _from_latents(self, out: Tensor) -> Tensor:
        """Output (B, T, H, v_dim) from the attention's latents (B, T, H, rank)."""
        return torch.einsum("bthr,hvr->bthv", out, self._up_weights()[1])

    def _expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads from the latents."""
        c = self.config
        k_latent, k_rope = k.split([c.kv_lora_rank, c.qk_rope_dim], -1)
        k_nope, v = self._expand(k_latent[:, :, 0], v[:, :, 0])
        return torch.cat([k_nope, k_rope.expand(-1, -1, c.num_heads, -1)], -1), v

    def _require_rope(self, rope: tuple[Tensor, Tensor] | None) -> None:
        size = self.config.qk_rope_dim
        if (rope is not None) != (size > 0):
            raise ValueError(
                f"{type(self).__name__}: rope must be given if and only if qk_rope_dim > 0, "
                f"got qk_rope_dim={size}, rope={'None' if rope is None else 'given'}"
            )

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | MaskMod | None = None,
        absorb: bool | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: queries and, with those in the state, keys and values.
            state: a Cache; the new latents are appended to it, all of it is attended to.
            rope: cos, sin of the positions of x, (T, qk_rope_dim / 2) or (B, T, qk_rope_dim / 2),
                or of x.values() where x is nested.
            mask, score_mod: as in Attention.
            absorb: attend to the latents themselves; default: with a state and T <= absorb_max.
        """
        c = self.config
        cache = require_cache("MultiHeadLatentAttention", state)
        x, sequences = sequences_of("MultiHeadLatentAttention", "x", x, state=cache)
        require_tokens("MultiHeadLatentAttention", x, self.config.dim)
        self._require_rope(rope)
        attend = sequences.attention()
        q = self._queries(self._query_latent(x), x)
        q, k, v = self._rotated(q, *self._latents(x), rope)
        if cache is not None:
            k, v, mask, score_mod, attend = cache.extend(k, v, attend, mask, score_mod)
        if absorb is None:
            absorb = cache is not None and x.shape[1] <= c.absorb_max
        if absorb:
            out = self._attend(attend, self._to_latents(q), k, v, mask, score_mod)
            out = self._from_latents(out)
        else:
            out = self._attend(attend, q, *self._expanded(k, v), mask, score_mod)
        return sequences.restored(self.o_proj(out.flatten(-2)))

    def _attend(
        self,
        attend: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
    ) -> Tensor:
        c = self.config
        out: Tensor = attend(
            q,
            k,
            v,
            causal=c.causal,
            window_size=c.window_size,
            mask=mask,
            scale=c.scale,
            score_mod=score_mod,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return out
