"""Multi-head, multi-query and grouped-query attention; self- or cross-attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import clamp, shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores import RelativeBias
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.attention._options import (
    check_options,
    convolved,
    forget_options,
    grown,
    in_chunks,
    plus,
    require_no_position_terms,
    sigmoid_bias,
    slopes_of,
)
from omniattn.modules.attention._shared import (
    check_sharing,
    mixed_values,
    own_rows,
    published,
    read,
    shared_reading,
    tensor_products,
)
from omniattn.modules.attention._states import CachingMixer
from omniattn.modules.base.fields import (
    Backend,
    Epsilon,
    Positive,
    Probability,
    Signed,
    Size,
    WindowSize,
)
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import require_tokens
from omniattn.modules.base.norm import LayerNorm, RMSNorm
from omniattn.modules.base.state import State, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, Reading, require_cache


class Attention(CachingMixer):
    """Computes y = W_o softmax(scale q k^T) v with q = W_q x, k = W_k s, v = W_v s.

    s is x in self-attention, or a source in cross-attention.

    Order: projections, qk-norm, rotary embedding, cache, attention, gate, output projection. Query
    head h uses kv head h // (num_heads / num_kv_heads): MHA, GQA (fewer kv heads) or MQA (one).
    A gate multiplies the input of W_o by act(W_g x), elementwise or per head.

    Causal by default, unlike `functional.attention`; encoders need causal=False.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim), source (B, S, source_dim) -> (B, T, dim).
        Both can be jagged nested tensors: sequences of different lengths without padding.
        Parameters q_proj, k_proj, v_proj, o_proj; with qk_norm q_norm and k_norm, or logit_scale
        (num_heads,); with a gate g_proj; sinks, head_scale and log_scale (num_heads,); with
        forget_gate f_proj; with q_rank q_down and q_down_norm; with ranks q_factors, k_factors and
        v_factors in place of the projections; value_mix (2,); with query_sinks sink_proj.

    Notes:
        The attention output of a fully masked query is 0, with zero gradients. Dropout is active in
        training mode only.

    Reference:
        Vaswani et al. 2017, arXiv 1706.03762; MQA: Shazeer 2019, arXiv 1911.02150; GQA: Ainslie
        et al. 2023, arXiv 2305.13245; gates: Qiu et al., Gated Attention for Large Language
        Models, 2025, arXiv 2505.06708; sigmoid: Ramapuram et al. 2024, arXiv 2409.04431; log_scale:
        Nakanishi, Scalable-Softmax Is Superior for Attention, 2025, arXiv 2501.19399; forget_gate:
        Lin et al., Forgetting Transformer, 2025, arXiv 2503.02130 (the layer of
        fla-org/flash-linear-attention at commit 20ceee5); q_rank: Hu et al., Multi-matrix
        Factorization Attention, 2024, arXiv 2412.19255; ranks: Zhang et al., Tensor Product
        Attention Is All You Need, 2025, arXiv 2501.06425 (T6-new/model/T6.py of tensorgi/TPA at
        commit bd94673); value_residual: Zhou et al., Value Residual Learning, 2024, arXiv
        2410.17897; shared_kv: Sun et al., You Only Cache Once, 2024, arXiv 2405.05254;
        stick_breaking: Tan et al. 2024, arXiv 2410.17980; softpick: Zuhri et al. 2025, arXiv
        2504.20966.

    Example:
        >>> layer = Attention(Attention.Config(dim=16, num_heads=4, num_kv_heads=2))
        >>> layer(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    shares = True
    takes_score_mod = True
    evicts = True
    quantizes = True

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
            head_dim: width of a head, default dim / num_heads.
            causal: True if query i attends to keys up to its own position (bottom-right aligned).
            cross: True to compute keys and values from `source`, never from x.
            source_dim: width of the source, default dim.
            window_size: (left, right), number of visible keys before and after the query's
                position, -1 for all.
            qk_norm: norm of q and k, None for none: "rms" (RMSNorm, Qwen3) or "layer" (LayerNorm
                without bias, ViT-22B) per head, with weights (head_dim,); "rms_full" over all heads
                (OLMo-2); "rms_fixed" per head without weights (Llama 4); "l2" for cosine similarity
                times a learned exp(logit_scale) per head, at most 100, instead of `scale` (Swin
                v2).
            bias, out_bias: True for biases of q_proj, k_proj and v_proj; of o_proj.
            rope_interleaved: True for rotary pairs (2i, 2i + 1) instead of (i, i + Dr / 2).
            scale: factor of the scores, default 1 / sqrt(head_dim).
            softcap: if positive, scores become softcap * tanh(scores / softcap).
            dropout_p: dropout probability of the attention weights.
            sinks: True for a learned logit per head, with value 0.
            head_scale: True for a learned factor of the scores per head, initially 1.
            gate: "elementwise" (one gate per element of each head), "headwise" or None.
            gate_activation: "sigmoid" or "silu", which is neither positive nor bounded.
            init_std, out_init_std: standard deviations of the weights, and of o_proj's.
            q_init_std: standard deviation of q_proj's weight, default init_std.
            backend: backend of all ops of the layer.
            qk_norm_offset: offset added to the weights of "rms" and "rms_full", which then start at
                1 - offset; 1.0 is the form 1 + w of Gemma 3 and Qwen3-Next.
            normalizer: "softmax", elementwise "sigmoid" with a bias of -ln n, "stick_breaking" or
                "softpick", see functional.stick_breaking_attention and softpick_attention.
            norm_n: n of "sigmoid"; 1 for no bias; None for the number of keys, for which decoding
                would be inexact and raises an error.
            alibi: largest exponent of ALiBi's slopes, 8 in its paper; None for no ALiBi.
            alibi_scale: factor of the slopes; Falcon's is 1 / sqrt(head_dim).
            rotary: False to ignore `rope`, for layers without positions among others that rotate.
            chunk_size: number of tokens of a chunk, beyond which queries do not see (Llama 4).
            query_growth, query_period: queries are multiplied by
                ``1 + growth ln(1 + floor((position + 1) / period))``; 0 for no growth.
            log_scale: True to multiply the scores by s ln n, n the number of visible keys, with a
                learned s per head, initially 0.43 (SSMax).
            forget_gate: True for a forget gate sigmoid(f_proj(x)) per token and head, by which
                earlier tokens count less (FoX), see functional.forgetting_attention.
            q_rank: rank of the projection of queries, which is then W_q RMSNorm(W_down x); with
                num_kv_heads=1 and wide heads this is MFA. None for the full rank.
            ranks: numbers of products a b^T, a per head and b per element of a head, whose mean is
                a token's queries, keys and values (TPA). Caches keep the factors.
            value_residual: "first" for the layer whose values others add, "later" for a layer with
                values w_1 v_first + w_2 v, w learned, initially 1/2 each (ResFormer).
            shared_kv: "source" for a layer whose keys and values, and cache, the later "reader"
                layers use, which have none (YOCO's cross-decoder, cross-layer attention).
            attend_current: False to hide each query's own key, as stick-breaking attention does.
            query_sinks: True for a sink of each query and head, with the logit sink_proj(x) and
                value 0, in place of `sinks` (Inkling 2).
        """

        causal: bool = True
        cross: bool = False
        source_dim: Size | None = None
        window_size: WindowSize = (-1, -1)
        qk_norm: str | None = None
        qk_norm_eps: Epsilon = 1e-6
        bias: bool = False
        out_bias: bool = False
        rope_interleaved: bool = False
        scale: Signed | None = None
        softcap: float = 0.0
        dropout_p: Probability = 0.0
        sinks: bool = False
        head_scale: bool = False
        gate: str | None = None
        gate_activation: str = "sigmoid"
        init_std: float = 0.02
        out_init_std: float = 0.02
        q_init_std: float | None = None
        backend: Backend = None
        qk_norm_offset: float = 0.0
        normalizer: str = "softmax"
        norm_n: Size | None = None
        alibi: Positive | None = None
        alibi_scale: Positive = 1.0
        rotary: bool = True
        chunk_size: Size | None = None
        query_growth: float = 0.0
        query_period: Size | None = None
        log_scale: bool = False
        forget_gate: bool = False
        q_rank: Size | None = None
        ranks: tuple[int, int, int] | None = None
        value_residual: str | None = None
        shared_kv: str | None = None
        attend_current: bool = True
        query_sinks: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            check_options(self)
            check_sharing(self)

    config: Config

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
        q_dim, kv_dim = c.num_heads * c.head_size, c.kv_heads * c.head_size
        source_dim = c.dim if c.source_dim is None else c.source_dim

        def linear(n_in: int, n_out: int, bias: bool, std: float) -> Linear:
            config = Linear.Config(n_in, n_out, bias, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        q_init_std = c.init_std if c.q_init_std is None else c.q_init_std
        if c.q_rank is not None:
            self.q_down = linear(c.dim, c.q_rank, False, c.init_std)
            norm = RMSNorm.Config(c.q_rank, c.qk_norm_eps, backend=c.backend)
            self.q_down_norm = RMSNorm(norm, device=device, dtype=dtype)
        if c.ranks is not None:
            factors = tensor_products(c, q_init_std, device=device, dtype=dtype)
            self.q_factors, self.k_factors, self.v_factors = factors
        else:
            self.q_proj = linear(c.q_rank or c.dim, q_dim, c.bias, q_init_std)
        if c.ranks is None and c.shared_kv != "reader":
            self.k_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
            self.v_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
        self.o_proj = linear(q_dim, c.dim, c.out_bias, c.out_init_std)
        self.q_norm = self._new_norm(q_dim, device, dtype)
        self.k_norm: RMSNorm | LayerNorm | None = None
        if c.shared_kv != "reader":
            self.k_norm = self._new_norm(kv_dim, device, dtype)

        def heads() -> nn.Parameter:  # fp32 for every dtype
            return nn.Parameter(torch.empty(c.num_heads, device=device))

        self.logit_scale = heads() if c.qk_norm == "l2" else None
        self.sinks = heads() if c.sinks else None
        if c.query_sinks:
            self.sink_proj = linear(c.dim, c.num_heads, False, c.init_std)
        self.head_scale = heads() if c.head_scale else None
        if c.gate is not None:
            gates = q_dim if c.gate == "elementwise" else c.num_heads
            self.g_proj = linear(c.dim, gates, False, c.init_std)
        self.f_proj = linear(c.dim, c.num_heads, True, c.init_std) if c.forget_gate else None
        self.log_scale = heads() if c.log_scale else None
        if c.value_residual == "later":
            self.value_mix = nn.Parameter(torch.empty(2, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises parameters per head.

        They are exp(logit_scale) = 10, sinks 0, head_scale 1, log_scale 0.43 and value_mix 1/2.
        """
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10))
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.head_scale is not None:
            nn.init.ones_(self.head_scale)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, 0.43)  # the mean of trained ones in its paper
        if self.config.value_residual == "later":
            nn.init.constant_(self.value_mix, 0.5)

    def _new_norm(
        self, width: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> RMSNorm | LayerNorm | None:
        """Builds the norm of queries or keys of this width, None if it has no weights."""
        c = self.config
        if c.qk_norm == "layer":
            layer = LayerNorm.Config(c.head_size, c.qk_norm_eps, bias=False, backend=c.backend)
            return LayerNorm(layer, device=device, dtype=dtype)
        if c.qk_norm in ("rms", "rms_full"):
            size = c.head_size if c.qk_norm == "rms" else width
            rms = RMSNorm.Config(size, c.qk_norm_eps, c.qk_norm_offset, backend=c.backend)
            return RMSNorm(rms, device=device, dtype=dtype)
        return None

    @property
    def convolved_width(self) -> int:
        c = self.config
        if c.cross or c.ranks is not None or c.shared_kv == "reader":
            return 0
        return (c.num_heads + 2 * c.kv_heads) * c.head_size

    @property
    def publishes(self) -> tuple[str, ...]:
        return published(self.config)

    @property
    def reads(self) -> tuple[str, ...]:
        return read(self.config)

    def _heads(self, x: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """Splits projected queries or keys into normalised heads (..., heads, head_dim)."""
        c = self.config
        if norm is not None and c.qk_norm == "rms_full":
            x = norm(x)
        x = x.unflatten(-1, (-1, c.head_size))
        if norm is not None and c.qk_norm != "rms_full":
            x = norm(x)
        if c.qk_norm == "rms_fixed":
            x = functional.rms_norm(x, eps=c.qk_norm_eps, backend=c.backend)
        if c.qk_norm == "l2":  # gives length sqrt(head_dim); eps keeps zeros at 0
            x = functional.rms_norm(x, eps=1e-24, backend=c.backend)
        return x

    def _queries(self, x: Tensor) -> Tensor:
        c = self.config
        if c.ranks is not None:
            return self.q_factors(x).unflatten(-1, (c.num_heads, -1))
        latent = x if c.q_rank is None else self.q_down_norm(self.q_down(x))
        return self._heads(self.q_proj(latent), self.q_norm)

    @property
    def _key_weight(self) -> Tensor:
        own = self.config.ranks is None and self.config.shared_kv != "reader"
        return self.k_proj.weight if own else self.o_proj.weight

    def _keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        v = self.v_proj(source).unflatten(-1, (self.config.kv_heads, -1))
        return self._heads(self.k_proj(source), self.k_norm), v

    @takes_cache
    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | MaskMod | None = None,
        bias: Tensor | None = None,
        relative: RelativeBias | None = None,
        alibi_slopes: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        shared: dict[str, Any] | None = None,
        convolve: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: input of the queries, and in self-attention of keys and values. A jagged nested
                tensor ``(B, *, dim)`` gives a jagged result; mask and bias then cover the longest
                sequences, as in `functional.attention_varlen`, and `state` must be None.
            source: (B, S, source_dim) input of keys and values in cross-attention, nested if x is;
                optional once `state` has stored it.
            state: a Cache. Self-attention appends the new keys and values and attends to all;
                cross-attention stores the source's keys and values in the first call and reads them
                in later calls.
            rope: (cos, sin) at the positions of x (of x.values() if nested), from RotaryEmbedding;
                self-attention only.
            mask: boolean, True = attend, broadcastable to (B, num_heads, T, S), a value of
                `functional.masks`, or a function f(b, h, q, k) as in flex_attention.
            bias: tensor added to the scores, broadcastable to (B, num_heads, T, S).
            relative, alibi_slopes: distance-dependent score terms, see functional.attention.
            score_mod: f(score, b, h, q, k), see functional.attention. q and k are positions in the
                sequence, including the tokens in `state`; in cross-attention, rows of x and source.
            shared: dict by which layers of a model share keys and values, see the config.
            convolve: a function of queries, keys and values, joined to (B, T, convolved_width),
                before the rotary embedding, as a DecoderBlock gives with `canon`.
        """
        c = self.config
        if convolve is not None and self.convolved_width == 0:
            raise ValueError(
                "Attention: convolve needs self-attention with keys of its own and no ranks, got "
                f"cross={c.cross}, ranks={c.ranks}, shared_kv={shown(c.shared_kv)}"
            )
        if c.alibi is not None:
            alibi_slopes = slopes_of(c, alibi_slopes, x)
        cache = new.require_gates(state) if c.forget_gate else require_cache("Attention", state)
        x, sequences = sequences_of("Attention", "x", x, state=cache)
        require_tokens("Attention", x, c.dim)
        keys = sequences
        if source is not None:
            source, keys = sequences_of("Attention", "source", source, queries=sequences)
        attend = sequences.attention(keys)
        past = 0 if cache is None else cache.length
        q = self._queries(x)
        rope, mask = rope if c.rotary else None, in_chunks(c, mask)
        if c.cross:
            k, v = self._cross_keys_and_values(source, cache, rope)
        else:
            if source is not None:
                raise ValueError("Attention: source must be None unless cross=True")
            k, v = own_rows(self, x)
            if convolve is not None:
                q, k, v = convolved(convolve, q, k, v)
            q = grown(c, q, sequences, past)
            v = mixed_values(self, v, shared)
            if rope is not None and (cache is None or not cache.moves):
                q, k = functional.apply_rotary(
                    q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
                )
            if c.ranks is not None:
                k, v = self.k_factors.joined(x, k), self.v_factors.joined(x, v)
            reading = Reading(k, v, mask, score_mod, attend)
            if cache is not None:
                reading = cache.attention(
                    *(k, v, attend, mask, score_mod),
                    bias=bias,
                    positional=c.normalizer == "stick_breaking"
                    or any(t is not None for t in (bias, relative, alibi_slopes)),
                    rope=rope,
                    interleaved=c.rope_interleaved,
                )
            k, v, mask, score_mod, attend = shared_reading(self, reading, shared)
        if c.normalizer == "sigmoid":
            bias = plus(sigmoid_bias(c, q, k, keys, cache), bias)
        if self.f_proj is not None:
            require_no_position_terms(relative, alibi_slopes)
            terms = forget_options(self.f_proj, x, sequences, cache)
            bias, alibi_slopes = plus(terms["bias"], bias), terms["alibi_slopes"]
        out: Tensor = attend(
            q,
            k,
            v,
            causal=c.causal,
            window_size=c.window_size,
            mask=mask,
            bias=bias,
            normalizer=c.normalizer,
            scale=c.scale if self.logit_scale is None else 1 / c.head_size,
            softcap=c.softcap,
            relative=relative,
            alibi_slopes=alibi_slopes,
            sinks=self.sinks if not c.query_sinks else self.sink_proj(x).transpose(1, 2),
            head_scale=self._head_scale(),
            score_mod=score_mod,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return sequences.restored(self.o_proj(self._gated(out, x).flatten(-2)))

    def _gated(self, out: Tensor, x: Tensor) -> Tensor:
        """Multiplies the heads by their gates, computed from x, if the layer has gates."""
        c = self.config
        if c.gate is None:
            return out
        gate = self.g_proj(x).unflatten(-1, (c.num_heads, -1))
        return out * (torch.sigmoid if c.gate_activation == "sigmoid" else nn.functional.silu)(gate)

    def _head_scale(self) -> Tensor | None:
        if self.logit_scale is None:
            return self.head_scale if self.log_scale is None else self.log_scale
        return clamp(self.logit_scale, most=math.log(100)).exp()

    def _cross_keys_and_values(
        self, source: Tensor | None, cache: Cache | None, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if rope is not None:
            raise ValueError("Attention: rope must be None with cross=True")
        if cache is not None and cache.filled:
            return cache.views()
        if source is None:
            raise ValueError("Attention: source must be given with cross=True and no filled cache")
        k, v = self._keys_and_values(source)
        return (k, v) if cache is None else cache.append(k, v)
