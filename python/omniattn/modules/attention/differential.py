"""Differential attention: the difference of two softmax maps with shared values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.fields import Backend, Epsilon, Size, WindowSize
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache


class DifferentialAttention(Mixer):
    """Computes ``o_h = (1 - l0) norm((P_h1 - lambda P_h2) v_h)`` with two softmax maps P per head.

    ``P_hc = softmax(scale q_hc k_hc^T)``; ``lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + l0`` is one
    learned number per layer, ``l0 = 0.8 - 0.6 exp(-0.3 depth)``. A head has two query and two key
    sub-heads of size D, and values of size 2 D; norm is an RMSNorm over 2 D. The result is
    y = W_o [o_1 .. o_H].

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; the lambda vectors are always fp32.

    Shape:
        x (B, T, dim) or a jagged nested tensor -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, lambda_q1, lambda_k1, lambda_q2, lambda_k2 (D,)
        and subln (2 D,).

    Reference:
        Ye et al., Differential Transformer, 2024, arXiv 2410.05258.

    Example:
        >>> config = DifferentialAttention.Config(dim=32, num_heads=2, depth=0)
        >>> DifferentialAttention(config)(torch.ones(1, 5, 32)).shape
        torch.Size([1, 5, 32])
    """

    takes_score_mod = True

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of heads of two sub-heads each; half of a comparable Attention's.
            depth: index of the layer, from 0.
            num_kv_heads: number of heads of keys (two sub-heads each) and values, default
                num_heads.
            head_dim: D, default dim / (2 num_heads).
            form: "published"; "simple" for lambda = 1 without the norm and the factor (1 - l0);
                "hf" for transformers' DiffLlama, which pairs sub-heads h and h + num_heads and has
                a norm without weight.
            gqa_map: mapping of sub-heads in the published form: "flash" (a head's sub-heads use
                those of its kv head) or "naive" (sub-head s uses sub-head
                s // (num_heads / num_kv_heads)).
            causal, window_size, rope_interleaved, init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        depth: int
        num_kv_heads: Size | None = None
        head_dim: Size | None = None
        form: str = "published"
        gqa_map: str = "flash"
        causal: bool = True
        window_size: WindowSize = (-1, -1)
        rope_interleaved: bool = True
        norm_eps: Epsilon = 1e-5
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, value, known in (
                ("form", self.form, ("published", "simple", "hf")),
                ("gqa_map", self.gqa_map, ("flash", "naive")),
            ):
                if value not in known:
                    raise ValueError(
                        f"DifferentialAttention: {name} must be one of {known}, "
                        f"got {name}={shown(value)}"
                    )
            if self.num_heads <= 0 or self.kv_heads <= 0 or self.num_heads % self.kv_heads:
                raise ValueError(
                    "DifferentialAttention: num_heads must be a multiple of num_kv_heads, "
                    f"got num_heads={self.num_heads}, num_kv_heads={self.kv_heads}"
                )
            if self.form == "hf" and self.gqa_map == "naive":
                raise ValueError(
                    "DifferentialAttention: gqa_map must be 'flash' with form='hf', "
                    "got gqa_map='naive'"
                )
            if self.head_dim is None and self.dim % (2 * self.num_heads):
                raise ValueError(
                    "DifferentialAttention: dim must be a multiple of 2 num_heads unless head_dim "
                    f"is given, got dim={self.dim}, num_heads={self.num_heads}"
                )

        @property
        def kv_heads(self) -> int:
            """Number of key and value heads."""
            return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

        @property
        def head_size(self) -> int:
            """Size D of a sub-head."""
            return self.dim // (2 * self.num_heads) if self.head_dim is None else self.head_dim

        @property
        def rotary_dim(self) -> int:
            """Number of dimensions of a sub-head that rotary embeddings rotate."""
            return self.head_size

        @property
        def lambda_init(self) -> float:
            """Initial lambda, l0."""
            return 0.8 - 0.6 * math.exp(-0.3 * self.depth)

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
        q_dim, kv_dim = 2 * c.num_heads * c.head_size, 2 * c.kv_heads * c.head_size

        def linear(n_in: int, n_out: int, std: float) -> Linear:
            config = Linear.Config(n_in, n_out, False, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, q_dim, c.init_std)
        self.k_proj = linear(c.dim, kv_dim, c.init_std)
        self.v_proj = linear(c.dim, kv_dim, c.init_std)
        self.o_proj = linear(q_dim, c.dim, c.out_init_std)
        if c.form == "simple":
            return

        wide = torch.promote_types(self.q_proj.weight.dtype, torch.float32)

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(c.head_size, device=device, dtype=wide))

        self.lambda_q1, self.lambda_k1 = vector(), vector()
        self.lambda_q2, self.lambda_k2 = vector(), vector()
        if c.form == "published":
            norm = RMSNorm.Config(2 * c.head_size, c.norm_eps, backend=c.backend)
            self.subln = RMSNorm(norm, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the vectors of lambda from N(0, 0.1^2)."""
        if self.config.form != "simple":
            for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
                nn.init.normal_(vector, std=0.1)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of keys [k_1 | k_2] and values, both of size 2 D per kv head."""
        sizes = (batch, max_length, self.config.kv_heads, 2 * self.config.head_size)
        return new.keys_and_values(self, self.k_proj.weight, *sizes, **storage)

    def scalar_lambda(self) -> Tensor | float:
        """Computes lambda in fp32 (fp64 for fp64)."""
        if self.config.form == "simple":
            return 1.0
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.config.lambda_init

    def _pairs(self, x: Tensor) -> Tensor:
        """Joins sub-heads (B, T, 2 H, D) to pairs (B, T, H, 2 D); a view unless form is "hf"."""
        if self.config.form == "hf":
            return x.unflatten(2, (2, -1)).transpose(2, 3).flatten(-2)
        return x.unflatten(2, (-1, 2)).flatten(-2)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | MaskMod | None = None,
        bias: Tensor | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        mask, bias and score_mod apply to both maps of a head; the other arguments as in Attention.
        """
        c = self.config
        size = c.head_size
        cache = require_cache("DifferentialAttention", state)
        x, sequences = sequences_of("DifferentialAttention", "x", x, state=cache)
        require_tokens("DifferentialAttention", x, self.config.dim)
        attend = sequences.attention()
        q, k, v = (p(x).unflatten(-1, (-1, size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if rope is not None:
            q, k = functional.apply_rotary(
                q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
            )
        q, k, v = self._pairs(q), self._pairs(k), self._pairs(v)
        if cache is not None:
            k, v, mask, score_mod, attend = cache.extend(
                k, v, attend, mask, score_mod, positional=bias is not None
            )
        group = c.num_heads // c.kv_heads
        maps = []
        for i in range(2):
            k_i, v_i = k[..., i * size : (i + 1) * size], v
            if c.gqa_map == "naive" and group > 1:
                heads = torch.arange(c.num_heads, device=x.device)
                k_i = k.unflatten(-1, (2, size)).flatten(2, 3)[:, :, (2 * heads + i) // group]
                v_i = v[:, :, heads // group]
            maps.append(
                attend(
                    q[..., i * size : (i + 1) * size],
                    k_i,
                    v_i,
                    causal=c.causal,
                    window_size=c.window_size,
                    mask=mask,
                    bias=bias,
                    score_mod=score_mod,
                    backend=c.backend,
                )
            )
        first, second = maps
        out = first - torch.as_tensor(self.scalar_lambda()).to(second.dtype) * second
        if c.form != "simple":
            weight = self.subln.weight if c.form == "published" else None
            out = functional.rms_norm(out, weight, eps=c.norm_eps, backend=c.backend)
            out = out * (1 - c.lambda_init)
        return sequences.restored(self.o_proj(out.flatten(-2)))
