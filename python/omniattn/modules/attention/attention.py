"""Multi-head attention layer: self or cross; multi-head, multi-query or grouped-query."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import clamp, require_number, shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores import RelativeBias
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.fields import Backend, Epsilon, Probability, Signed, Size, WindowSize
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import Sequences, sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.norm import LayerNorm, RMSNorm
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache
from omniattn.modules.caches.eviction import Eviction, policies_of_groups


class Attention(Mixer):
    """y = W_o softmax(scale q k^T) v with q = W_q x, k = W_k s, v = W_v s; s is x or a source.

    Order: projections, qk-norm, rotary embedding, cache, attention, gate, output projection. Query
    head h reads kv head h // (num_heads / num_kv_heads): MHA, GQA (fewer kv heads) or MQA (one).
    A gate multiplies the input of W_o by act(W_g x), elementwise or for each head.

    Causal by default, which `functional.attention` is not: encoders need causal=False.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), source (B, S, source_dim) -> (B, T, dim).
        Either may be a jagged nested tensor: sequences of any lengths, without padding.
        Parameters q_proj, k_proj, v_proj, o_proj; with qk_norm q_norm and k_norm, or logit_scale
        (num_heads,); with a gate g_proj; sinks and head_scale (num_heads,).

    Notes:
        A query that sees no key gives W_o 0 + b and has zero gradients. Dropout acts in training
        mode only.

    Reference:
        Vaswani et al. 2017, arXiv 1706.03762; MQA: Shazeer 2019, arXiv 1911.02150; GQA: Ainslie
        et al. 2023, arXiv 2305.13245; gates: Qiu et al., Gated Attention for Large Language
        Models, 2025, arXiv 2505.06708; sigmoid: Ramapuram et al. 2024, arXiv 2409.04431.

    Example:
        >>> layer = Attention(Attention.Config(dim=16, num_heads=4, num_kv_heads=2))
        >>> layer(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    takes_score_mod = True
    evicts = True

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: query heads.
            num_kv_heads: key and value heads, a divisor of num_heads; default num_heads.
            head_dim: default dim / num_heads.
            causal: query i sees keys up to its own position (bottom-right aligned).
            cross: keys and values come from `source`, never from x.
            source_dim: width of the source, default dim.
            window_size: (left, right) keys seen before and after the own position, -1 unbounded.
            qk_norm: of every head of q and k "rms" (RMSNorm, Qwen3) or "layer" (LayerNorm without
                bias, ViT-22B), both with weights (head_dim,); "rms_full" of all heads together
                (OLMo-2); "l2" for cosines times a learned exp(logit_scale), at most 100, per head
                in place of `scale` (Swin v2); None.
            bias, out_bias: of q_proj, k_proj, v_proj; of o_proj.
            rope_interleaved: rotary pairs are (2i, 2i + 1) instead of (i, i + Dr / 2).
            scale: of the scores, default 1 / sqrt(head_dim).
            softcap: scores become softcap * tanh(scores / softcap) if positive.
            dropout_p: of the attention weights.
            sinks: a learned logit per head with value 0.
            head_scale: a learned factor of the scores per head, from 1 on.
            gate: "elementwise" (one for each number of each head), "headwise" or None.
            gate_activation: "sigmoid" or "silu", which is neither positive nor bounded.
            init_std, out_init_std: of the weights and of o_proj.
            q_init_std: of q_proj, default init_std.
            backend: of all ops of this layer.
            qk_norm_offset: of "rms" and "rms_full", added to weights that then start at 1 - offset:
                1.0 is the form 1 + w of Gemma 3 and Qwen3-Next.
            normalizer: "softmax", or "sigmoid" of each score alone, with a bias of -ln n.
            norm_n: n of "sigmoid"; None for the number of keys, with which decoding is not exact
                and refused. 1 leaves the bias out.
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

        def __post_init__(self) -> None:
            super().__post_init__()
            require_number("Attention", "softcap", self.softcap, 0)
            if self.cross and self.causal:
                raise ValueError("Attention: cross must have causal=False, got causal=True")
            for name, value, known in (
                ("gate", self.gate, (None, "elementwise", "headwise")),
                ("gate_activation", self.gate_activation, ("sigmoid", "silu")),
                ("qk_norm", self.qk_norm, (None, "rms", "rms_full", "layer", "l2")),
                ("normalizer", self.normalizer, ("softmax", "sigmoid")),
            ):
                if value not in known:
                    raise ValueError(
                        f"Attention: {name} must be one of {known}, got {name}={shown(value)}"
                    )
            if self.qk_norm == "l2" and (self.head_scale or self.scale is not None):
                raise ValueError(
                    'Attention: qk_norm="l2" has a scale of its own, '
                    f"got scale={self.scale}, head_scale={self.head_scale}"
                )
            if self.qk_norm_offset and self.qk_norm not in ("rms", "rms_full"):
                raise ValueError(
                    'Attention: qk_norm_offset needs qk_norm "rms" or "rms_full", '
                    f"got qk_norm={shown(self.qk_norm)}, qk_norm_offset={self.qk_norm_offset}"
                )
            if self.normalizer == "softmax" and self.norm_n is not None:
                raise ValueError(f"Attention: norm_n needs sigmoid, got norm_n={self.norm_n}")
            if self.normalizer == "sigmoid" and self.sinks:
                raise ValueError("Attention: sinks need softmax, got normalizer='sigmoid'")

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
        self.q_proj = linear(c.dim, q_dim, c.bias, q_init_std)
        self.k_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
        self.v_proj = linear(source_dim, kv_dim, c.bias, c.init_std)
        self.o_proj = linear(q_dim, c.dim, c.out_bias, c.out_init_std)
        self.q_norm = self._new_norm(q_dim, device, dtype)
        self.k_norm = self._new_norm(kv_dim, device, dtype)

        def heads() -> nn.Parameter:  # fp32, whatever the dtype
            return nn.Parameter(torch.empty(c.num_heads, device=device))

        self.logit_scale = heads() if c.qk_norm == "l2" else None
        self.sinks = heads() if c.sinks else None
        self.head_scale = heads() if c.head_scale else None
        if c.gate is not None:
            gates = q_dim if c.gate == "elementwise" else c.num_heads
            self.g_proj = linear(c.dim, gates, False, c.init_std)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters of heads: factor 10 of l2, sinks 0, factor 1."""
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10))
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.head_scale is not None:
            nn.init.ones_(self.head_scale)

    def _new_norm(
        self, width: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> RMSNorm | LayerNorm | None:
        """The norm of queries or keys of this width, if it has weights."""
        c = self.config
        if c.qk_norm == "layer":
            layer = LayerNorm.Config(c.head_size, c.qk_norm_eps, bias=False, backend=c.backend)
            return LayerNorm(layer, device=device, dtype=dtype)
        if c.qk_norm in ("rms", "rms_full"):
            size = c.head_size if c.qk_norm == "rms" else width
            rms = RMSNorm.Config(size, c.qk_norm_eps, c.qk_norm_offset, backend=c.backend)
            return RMSNorm(rms, device=device, dtype=dtype)
        return None

    def _heads(self, x: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """Projected queries or keys as normed heads (..., heads, head_dim)."""
        c = self.config
        if norm is not None and c.qk_norm == "rms_full":
            x = norm(x)
        x = x.unflatten(-1, (-1, c.head_size))
        if norm is not None and c.qk_norm != "rms_full":
            x = norm(x)
        if c.qk_norm == "l2":  # of length sqrt(head_dim); zeros stay
            x = functional.rms_norm(x, eps=1e-24, backend=c.backend)
        return x

    def new_state(
        self,
        batch: int,
        max_length: int,
        *,
        rolling: bool = False,
        eviction: Eviction | Sequence[Eviction] | None = None,
        **storage: Unpack[Storage],
    ) -> Cache:
        """An empty cache.

        Args:
            batch, max_length: sizes; of the source in a cross-attention.
            device, dtype: of the storage, default: as the parameters.
            rolling: keep only the tokens in the window; needs causal and a left window.
            eviction: which tokens to keep, a policy or one for each query head; causal
                self-attention by softmax without a window only.
        """
        c, like = self.config, (self, self.k_proj.weight)
        if eviction is not None:
            policies = self._policies(eviction, rolling)
            return new.by_policy(
                *like, policies, batch, max_length, c.kv_heads, c.head_size, **storage
            )
        if c.cross:
            return new.of_source(*like, **storage)
        if not rolling:
            return new.keys_and_values(*like, batch, max_length, c.kv_heads, c.head_size, **storage)
        if not c.causal or c.window_size[0] < 0:
            raise ValueError(
                "Attention: a rolling cache must have causal=True and a left window, "
                f"got causal={c.causal}, window_size={c.window_size}"
            )
        length = min(max_length, c.window_size[0] + 1)
        return new.of_window(*like, batch, length, c.kv_heads, c.head_size, **storage)

    def _policies(
        self, eviction: Eviction | Sequence[Eviction], rolling: bool
    ) -> Eviction | tuple[Eviction, ...]:
        """One policy, or one for each kv head."""
        c = self.config
        whole = c.causal and c.window_size == (-1, -1) and c.normalizer == "softmax"
        if rolling or not whole:
            raise ValueError(
                "Attention: eviction needs causal self-attention by softmax without a window, "
                f"got causal={c.causal}, window_size={c.window_size}, "
                f"normalizer={shown(c.normalizer)}, rolling={rolling}"
            )
        return policies_of_groups("Attention", eviction, c.num_heads, c.kv_heads)

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
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim).

        Args:
            x: queries, and keys and values of self-attention. A jagged nested tensor
                ``(B, *, dim)`` gives one; mask and bias then cover the longest sequences, as
                in `functional.attention_varlen`, and there is no state.
            source: (B, S, source_dim), of cross-attention; may be left out once it is in `state`.
                Nested if x is.
            state: a Cache. Self-attention appends the new keys and values and attends to all; with
                cross-attention the first call stores the keys of the source, later calls read them.
            rope: cos, sin of the positions of x (of x.values()), from RotaryEmbedding;
                self-attention only.
            mask: boolean, True = attend, broadcastable to (B, num_heads, T, S), a value of
                `functional.masks`, or f(b, h, q, k) as flex_attention takes it.
            bias: added to the scores, broadcastable to (B, num_heads, T, S).
            relative, alibi_slopes: terms of the distance, see functional.attention.
            score_mod: f(score, b, h, q, k), see functional.attention. q and k are the positions of
                tokens, after those in `state`; in cross-attention, of the rows of x and source.
        """
        c = self.config
        cache = require_cache("Attention", state)
        x, sequences = sequences_of("Attention", "x", x, state=cache)
        require_tokens("Attention", x, c.dim)
        keys = sequences
        if source is not None:
            source, keys = sequences_of("Attention", "source", source, queries=sequences)
        attend = sequences.attention(keys)
        q = self._heads(self.q_proj(x), self.q_norm)
        if c.cross:
            k, v = self._cross_keys_and_values(source, cache, rope)
        else:
            if source is not None:
                raise ValueError("Attention: source must be None unless cross=True")
            k, v = self._keys_and_values(x)
            if rope is not None and (cache is None or not cache.moves):
                q, k = functional.apply_rotary(
                    q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
                )
            if cache is not None:
                k, v, mask, score_mod, attend = cache.attention(
                    *(k, v, attend, mask, score_mod),
                    bias=bias,
                    positional=any(t is not None for t in (bias, relative, alibi_slopes)),
                    rope=rope,
                    interleaved=c.rope_interleaved,
                )
        if c.normalizer == "sigmoid":
            by_n = self._sigmoid_bias(q, k, keys, cache)
            bias = by_n if bias is None else bias + by_n
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
            sinks=self.sinks,
            head_scale=self._head_scale(),
            score_mod=score_mod,
            dropout_p=c.dropout_p if self.training else 0.0,
            backend=c.backend,
        )
        return sequences.restored(self.o_proj(self._gated(out, x).flatten(-2)))

    def _sigmoid_bias(self, q: Tensor, k: Tensor, keys: Sequences, cache: Cache | None) -> Tensor:
        """-ln n, (N | 1, 1, 1, 1), in the precision of the scores."""
        c = self.config
        if c.norm_n is None and cache is not None and not c.cross:
            raise ValueError("Attention: decoding with sigmoid needs a norm_n, got norm_n=None")
        sizes = keys.sizes(k) if c.norm_n is None else q.new_tensor(c.norm_n, dtype=torch.int64)
        n = sizes.clamp(min=1).to(torch.promote_types(q.dtype, torch.float32))
        return -n.log().view(-1, 1, 1, 1)

    def _gated(self, out: Tensor, x: Tensor) -> Tensor:
        """The heads times their gates of x, if there are any."""
        c = self.config
        if c.gate is None:
            return out
        gate = self.g_proj(x).unflatten(-1, (c.num_heads, -1))
        return out * (torch.sigmoid if c.gate_activation == "sigmoid" else nn.functional.silu)(gate)

    def _head_scale(self) -> Tensor | None:
        if self.logit_scale is None:
            return self.head_scale
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
