"""Multi-head latent attention: keys and values are projected from a small latent per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
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
    """Attention with a cache of one latent and one rotary key per token, shared by all heads.

    ``[c | k_r] = x W_dkv`` with a norm on c; ``[k_n | v] = c W_ukv`` per head;
    ``[q_n | q_r] = norm(x W_dq) W_uq``; ``y = W_o softmax(scale (q_n k_n^T + q_r k_r^T)) v`` with
    rotated q_r and k_r. In the absorbed form q_n is multiplied by the key half of W_ukv, and
    attention runs on the latents, as multi-query attention with values c.

    Multi-head low-rank attention (MLRA) splits c into num_latents parts with norms of their own.
    Each part has keys and values for a group of the heads, so that processes can store a part each.
    With num_branches = b, a head attends to b parts separately, and its output is the sum of the b
    results divided by sqrt(b).

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) or a jagged nested tensor -> the same shape.
        Parameters, named as in DeepSeek-V3: q_proj or q_a_proj, q_a_layernorm, q_b_proj;
        kv_a_proj_with_mqa, kv_a_layernorm (kv_a_layernorms of several latents), kv_b_proj; o_proj.

    Reference:
        DeepSeek-AI, DeepSeek-V2, 2024, arXiv 2405.04434; DeepSeek-V3, 2024, arXiv 2412.19437; MLRA:
        Liu et al., Multi-Head Low-Rank Attention, 2026, arXiv 2603.02188. Verified against
        model/mlra_2.py and model/mlra_4.py of SongtaoLiu0823/MLRA at commit 7e0eb5c.

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
            num_heads: number of heads of queries, keys and values.
            q_lora_rank: size of the queries' latent, None to project queries directly from x.
            kv_lora_rank: size of the latent c.
            qk_nope_dim, qk_rope_dim: sizes of the unrotated and rotated parts of a key;
                qk_rope_dim=0 for no positions.
            v_dim: size of a value.
            causal, window_size: as in Attention.
            rope_interleaved: True for rotary pairs (2i, 2i + 1), as in DeepSeek's weights.
            mscale: factor of YaRN; the scale is (qk_nope_dim + qk_rope_dim)^-1/2 mscale^2.
            latent_norm: True for RMSNorms on the latents.
            q_rope_from: "latent", or "x" to project rotary queries directly from x.
            separate_kv_latents: True for one latent for keys and one for values.
            absorb_max: largest number of new tokens for which the absorbed form is used with a
                state.
            norm_eps, dropout_p, init_std, out_init_std, backend: as in Attention.
            share_up: True if all heads share one projection from the latents to keys and values,
                which then differ between heads only in their queries.
            fuse_up: True to multiply the projections to and from the latents first where there is
                no state, so that keys and values come from x by one product, of the same result;
                needs latent_norm=False.
            rotary: False to rotate nothing, whatever `rope` is (Kimi Linear).
            num_latents: number of parts of c, each of size kv_lora_rank / num_latents; needs
                separate_kv_latents, share_up and fuse_up False. Part i is of group
                i mod (num_latents / num_branches) of the heads.
            num_branches: number of parts that a head attends to; 4 of MLRA-4, 2 of MLRA-2, both
                with num_latents=4.
            latent_scale: True to multiply latents by sqrt(dim / size), size that of the queries'
                latent or of a part of c (MLRA).
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
        share_up: bool = field(default=False, kw_only=True)
        fuse_up: bool = field(default=False, kw_only=True)
        rotary: bool = field(default=True, kw_only=True)
        num_latents: Size = field(default=1, kw_only=True)
        num_branches: Size = field(default=1, kw_only=True)
        latent_scale: bool = field(default=False, kw_only=True)

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
            if self.fuse_up and self.latent_norm:
                raise ValueError(
                    "MultiHeadLatentAttention: fuse_up must be False if a norm is between the "
                    "projections, got fuse_up=True, latent_norm=True"
                )
            self._require_parts()

        def _require_parts(self) -> None:
            """Requires that latents have parts of equal sizes for groups of equal sizes."""
            parts, branches = self.num_latents, self.num_branches
            groups = parts // branches
            if parts % branches or self.kv_lora_rank % parts or self.num_heads % groups:
                raise ValueError(
                    "MultiHeadLatentAttention: num_latents must divide kv_lora_rank, num_branches "
                    "num_latents, and num_latents / num_branches num_heads, got "
                    f"num_latents={parts}, kv_lora_rank={self.kv_lora_rank}, "
                    f"num_branches={branches}, num_heads={self.num_heads}"
                )
            single = self.separate_kv_latents, self.share_up, self.fuse_up
            if parts > 1 and any(single):
                raise ValueError(
                    "MultiHeadLatentAttention: num_latents must be 1 with separate_kv_latents, "
                    f"share_up or fuse_up, got num_latents={parts}, separate_kv_latents="
                    f"{single[0]}, share_up={single[1]}, fuse_up={single[2]}"
                )
            if self.fuse_up and self.latent_scale:
                raise ValueError(
                    "MultiHeadLatentAttention: latent_scale must be False with fuse_up, got "
                    "latent_scale=True, fuse_up=True"
                )

        @property
        def scale(self) -> float:
            """Factor of the scores."""
            return (self.qk_nope_dim + self.qk_rope_dim) ** -0.5 * self.mscale**2

        @property
        def query_heads(self) -> int:
            """Number of heads of the attention: those of all branches."""
            return self.num_branches * self.num_heads

        @property
        def up_heads(self) -> int:
            """Number of heads of the projection from the latents."""
            return 1 if self.share_up else self.query_heads

        @property
        def latent_dim(self) -> int:
            """Size of a part of c."""
            return self.kv_lora_rank // self.num_latents

        @property
        def rotary_dim(self) -> int:
            """Number of dimensions of a head that rotary embeddings rotate."""
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
            if c.num_latents > 1:
                self.kv_a_layernorms = nn.ModuleList(
                    norm(c.latent_dim) for _ in range(c.num_latents)
                )
            else:
                self.kv_a_layernorm = norm(c.kv_lora_rank)
            if c.separate_kv_latents:
                self.v_a_layernorm = norm(c.kv_lora_rank)
        if c.separate_kv_latents:
            self.k_b_proj = linear(c.kv_lora_rank, c.up_heads * c.qk_nope_dim)
            self.v_b_proj = linear(c.kv_lora_rank, c.up_heads * c.v_dim)
        else:  # rows of each head's key, then of its value
            self.kv_b_proj = linear(c.latent_dim, c.up_heads * (c.qk_nope_dim + c.v_dim))
        self.o_proj = linear(c.num_heads * c.v_dim, c.dim, c.out_init_std)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of latents."""
        c = self.config
        weight, rank = self.kv_a_proj_with_mqa.weight, c.kv_lora_rank
        if not c.separate_kv_latents:
            sizes = (batch, max_length, rank, c.qk_rope_dim)
            return new.of_latents(self, weight, *sizes, **storage)
        sizes = (batch, max_length, 1, rank + c.qk_rope_dim)
        return new.keys_and_values(self, weight, *sizes, v_head_dim=rank, **storage)

    def _rotate(self, x: Tensor, start: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the dimensions of x (B, T, H, D) from `start` on."""
        c = self.config
        turned, _ = functional.apply_rotary(
            x, None, *rope, rotary_start=start, interleaved=c.rope_interleaved, backend=c.backend
        )
        return turned

    def _query_latent(self, x: Tensor) -> Tensor:
        """Returns the input of the query projection: the latent (B, T, q_lora_rank), or x."""
        c = self.config
        if c.q_lora_rank is None:
            return x
        latent: Tensor = self.q_a_proj(x)
        latent = self.q_a_layernorm(latent) if c.latent_norm else latent
        return latent * (c.dim / c.q_lora_rank) ** 0.5 if c.latent_scale else latent

    def _queries(self, latent: Tensor, x: Tensor) -> Tensor:
        """Computes unrotated queries (B, T, H, qk_nope_dim + qk_rope_dim)."""
        c = self.config
        q = (self.q_proj if c.q_lora_rank is None else self.q_b_proj)(latent)
        q = q.unflatten(-1, (c.num_heads, -1))
        if c.q_rope_from == "x" and c.qk_rope_dim:
            q = torch.cat([q, self.q_rope_proj(x).unflatten(-1, (c.num_heads, -1))], -1)
        return q

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes latents of keys and values (B, T, 1, rank) and k_r (B, T, 1, rope_dim)."""
        c = self.config
        count = 2 if c.separate_kv_latents else 1
        parts = self.kv_a_proj_with_mqa(x)[:, :, None]
        *latents, rope = parts.split([c.kv_lora_rank] * count + [c.qk_rope_dim], -1)
        if c.latent_norm:
            latents[0] = self._normalized(latents[0])
            if c.separate_kv_latents:
                latents[1] = self.v_a_layernorm(latents[1])
        if c.latent_scale:
            latents = [latent * (c.dim / c.latent_dim) ** 0.5 for latent in latents]
        return latents[0], latents[-1], rope

    def _normalized(self, latent: Tensor) -> Tensor:
        """Applies the norm of each part of a latent (..., rank)."""
        if self.config.num_latents == 1:
            return self.kv_a_layernorm(latent)
        parts = latent.split(self.config.latent_dim, -1)
        norms = self.kv_a_layernorms
        return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1)

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Returns the projections from latents: to keys (up_heads, qk_nope_dim, latent_dim), to
        values (up_heads, v_dim, latent_dim)."""
        c = self.config
        if c.separate_kv_latents:
            k, v = weight_of(self.k_b_proj), weight_of(self.v_b_proj)
            return k.unflatten(0, (c.up_heads, -1)), v.unflatten(0, (c.up_heads, -1))
        both = weight_of(self.kv_b_proj).unflatten(0, (c.up_heads, -1))
        k, v = both.split([c.qk_nope_dim, c.v_dim], 1)
        return k, v

    def _expand(self, k_latent: Tensor, v_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Maps latents (B, S, rank) to keys and values (B, S, up_heads, qk_nope_dim or v_dim)."""
        c = self.config
        if c.separate_kv_latents:
            k, v = self.k_b_proj(k_latent), self.v_b_proj(v_latent)
            return k.unflatten(-1, (c.up_heads, -1)), v.unflatten(-1, (c.up_heads, -1))
        if c.num_latents > 1:
            parts = k_latent.unflatten(-1, (c.num_latents, -1))
            up = weight_of(self.kv_b_proj).unflatten(0, (c.num_latents, -1))
            both = torch.einsum("bslr,lor->bslo", parts, up).flatten(-2)
        else:
            both = self.kv_b_proj(k_latent)
        k, v = both.unflatten(-1, (c.up_heads, -1)).split([c.qk_nope_dim, c.v_dim], -1)
        return k, v

    def _rotated(
        self,
        q: Tensor,
        k_latent: Tensor,
        v: Tensor,
        k_rope: Tensor,
        rope: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates queries and keys; returns q, k (B, T, 1, rank + rope_dim), v (B, T, 1, rank)."""
        c = self.config
        k = torch.cat([k_latent, k_rope], -1)
        if rope is not None and c.rotary:
            q = self._rotate(q, c.qk_nope_dim, rope)
            k = self._rotate(k, c.kv_lora_rank, rope)
        return q, k, v

    def _to_latents(self, q: Tensor) -> Tensor:
        """Computes queries (B, T, H, latent_dim + rope_dim) of the absorbed form."""
        c = self.config
        q_nope, q_rope = q.split([c.qk_nope_dim, c.qk_rope_dim], -1)
        up = self._up_weights()[0].expand(c.query_heads, -1, -1)
        q_nope = torch.einsum("bthd,hdr->bthr", q_nope, up)
        return torch.cat([q_nope, q_rope], -1)

    def _from_latents(self, out: Tensor) -> Tensor:
        """Maps the absorbed form's output (B, T, H, latent_dim) to values (B, T, H, v_dim)."""
        up = self._up_weights()[1].expand(self.config.query_heads, -1, -1)
        return torch.einsum("bthr,hvr->bthv", out, up)

    def _by_part(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys (B, S, num_latents, latent_dim + rope_dim) and values of the absorbed form
        from those of one head."""
        c = self.config
        if c.num_latents == 1:
            return k, v
        latent, rope = k.split([c.kv_lora_rank, c.qk_rope_dim], -1)
        parts = latent[:, :, 0].unflatten(-1, (c.num_latents, -1))
        k = torch.cat([parts, rope.expand(-1, -1, c.num_latents, -1)], -1)
        return k, k[..., : c.latent_dim]

    def _joined(self, out: Tensor) -> Tensor:
        """Adds the branches of outputs (B, T, query_heads, v_dim); returns (B, T, H v_dim)."""
        branches = self.config.num_branches
        if branches > 1:
            out = out.unflatten(2, (branches, -1)).sum(2) * branches**-0.5
        return out.flatten(-2)

    def _expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys and values of all heads from the latents."""
        c = self.config
        k_latent, k_rope = k.split([c.kv_lora_rank, c.qk_rope_dim], -1)
        k_nope, v = self._expand(k_latent[:, :, 0], v[:, :, 0])
        return torch.cat([k_nope, k_rope.expand(-1, -1, c.up_heads, -1)], -1), v

    def _fused(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Computes keys and values of all heads from x by the product of both projections."""
        c = self.config
        down = weight_of(self.kv_a_proj_with_mqa)
        *latents, rotary = down.split(
            [c.kv_lora_rank] * (1 + c.separate_kv_latents) + [c.qk_rope_dim]
        )
        k_up, v_up = self._up_weights()
        weights = (k_up @ latents[0]).flatten(0, 1), (v_up @ latents[-1]).flatten(0, 1), rotary
        both = functional.linear(x, torch.cat(weights), backend=c.backend)
        k, v, k_rope = both.split([len(weight) for weight in weights], -1)
        k_rope = k_rope[:, :, None].expand(-1, -1, c.up_heads, -1)
        k = torch.cat([k.unflatten(-1, (c.up_heads, -1)), k_rope], -1)
        if rope is not None:
            k = self._rotate(k, c.qk_nope_dim, rope)
        return k, v.unflatten(-1, (c.up_heads, -1))

    def _require_rope(self, rope: tuple[Tensor, Tensor] | None) -> None:
        size = self.config.qk_rope_dim
        if not self.config.rotary:
            return
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
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: new tokens.
            state: a Cache, to which the new latents are appended before attention to all of it.
            rope: (cos, sin) at the positions of x, (T, qk_rope_dim / 2) or (B, T, qk_rope_dim / 2),
                or of x.values() if x is nested.
            mask, score_mod: as in Attention, with num_branches num_heads heads.
            absorb: True for the absorbed form; default: with a state and T <= absorb_max.
        """
        c = self.config
        cache = require_cache("MultiHeadLatentAttention", state)
        x, sequences = sequences_of("MultiHeadLatentAttention", "x", x, state=cache)
        require_tokens("MultiHeadLatentAttention", x, self.config.dim)
        self._require_rope(rope)
        attend = sequences.attention()
        q = self._queries(self._query_latent(x), x)
        if c.fuse_up and cache is None and not absorb:
            q = q if rope is None else self._rotate(q, c.qk_nope_dim, rope)
            out = self._attend(attend, q, *self._fused(x, rope), mask, score_mod)
            return sequences.restored(self.o_proj(out.flatten(-2)))
        q, k, v = self._rotated(q, *self._latents(x), rope)
        q = q.repeat(1, 1, c.num_branches, 1) if c.num_branches > 1 else q
        if cache is not None:
            k, v, mask, score_mod, attend = cache.extend(k, v, attend, mask, score_mod)
        if absorb is None:
            absorb = cache is not None and x.shape[1] <= c.absorb_max
        if absorb:
            k, v = self._by_part(k, v)
            out = self._attend(attend, self._to_latents(q), k, v, mask, score_mod)
            out = self._from_latents(out)
        else:
            out = self._attend(attend, q, *self._expanded(k, v), mask, score_mod)
        return sequences.restored(self.o_proj(self._joined(out)))

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
