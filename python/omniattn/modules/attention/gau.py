"""Gated attention unit: one gated attention head replaces attention and feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores import DistanceBias, RelativeBias, T5Bias
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences, sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache


class GatedAttentionUnit(Mixer):
    """Computes ``y = (u * (A v)) W_o`` with u = silu(x W_u), v = silu(x W_v), z = silu(x W_z).

    ``q = z g_q + b_q`` and ``k = z g_k + b_k`` share the projection z. A is
    ``relu(q k^T / n + b)^2`` with n the number of keys, or ``softmax(q k^T / sqrt(s) + b)`` with an
    optional relative bias b. The enclosing block provides norm and residual.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) or a jagged nested tensor -> the same shape.
        Parameters u_proj, v_proj, z_proj, o_proj, gamma and beta (2, key_dim) for q and k, and with
        a relative bias its table relative_bias.

    Reference:
        Hua et al., Transformer Quality in Linear Time, 2022, arXiv 2202.10447.

    Example:
        >>> GatedAttentionUnit(GatedAttentionUnit.Config(dim=8))(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    takes_score_mod = True

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            expansion: width of u and v as a multiple of dim.
            key_dim: s, width of q and k.
            attention: "relu2" or "softmax".
            norm_n: n of relu2; None for the number of keys. Decoding requires a constant.
            relative: None, "t5" (32 buckets) or "toeplitz" (one bias per distance).
            max_length: largest number of keys with a toeplitz bias.
            bias_inside_n: True for relu2 with the bias inside: relu((q k^T + sqrt(dim) b) / n)^2.
            causal, rope_interleaved, init_std, backend: as in Attention.
        """

        dim: Size
        expansion: Size = 2
        key_dim: Size = 128
        attention: str = "relu2"
        norm_n: Size | None = None
        relative: str | None = None
        max_length: Size = 512
        bias_inside_n: bool = False
        causal: bool = True
        rope_interleaved: bool = False
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, value, known in (
                ("attention", self.attention, ("relu2", "softmax")),
                ("relative", self.relative, (None, "t5", "toeplitz")),
            ):
                if value not in known:
                    raise ValueError(
                        f"GatedAttentionUnit: {name} must be one of {known}, "
                        f"got {name}={shown(value)}"
                    )

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
        wide = c.expansion * c.dim

        def linear(n_in: int, n_out: int) -> Linear:
            config = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.u_proj, self.v_proj = linear(c.dim, wide), linear(c.dim, wide)
        self.z_proj, self.o_proj = linear(c.dim, c.key_dim), linear(wide, c.dim)

        def parameter(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))

        self.gamma, self.beta = parameter(2, c.key_dim), parameter(2, c.key_dim)
        if c.relative is not None:
            self.relative_bias = parameter(32 if c.relative == "t5" else 2 * c.max_length - 1, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws gamma and the relative bias from N(0, 0.02^2) and zeroes beta."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        if self.config.relative is not None:
            nn.init.normal_(self.relative_bias, std=0.02)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache of one head with keys of size key_dim, values of size expansion * dim."""
        c = self.config
        if c.attention == "relu2" and c.norm_n is None:
            raise ValueError(
                "GatedAttentionUnit: decoding needs a constant norm_n, got norm_n=None: weights of "
                "earlier tokens would change with the number of keys"
            )
        sizes, wide = (batch, max_length, 1, c.key_dim), c.expansion * c.dim
        return new.keys_and_values(self, self.v_proj.weight, *sizes, v_head_dim=wide, **storage)

    def _relative(self, n: int) -> RelativeBias | None:
        c = self.config
        if c.relative is None:
            return None
        table: Tensor = self.relative_bias
        if c.attention == "relu2" and c.bias_inside_n:
            table = table * (c.dim**0.5 / n)
        if c.relative == "t5":
            return T5Bias(table, bidirectional=not c.causal)
        return DistanceBias(table, zero=c.max_length - 1)

    def _n(self, x: Tensor, k: Tensor, sequences: Sequences) -> tuple[int, Tensor | None]:
        """Returns n, and for packed sequences its ratio to the n of each token's sequence.

        relu(a s)^2 = a^2 relu(s)^2 for a > 0, so that either q or the output can be scaled by the
        ratio.
        """
        c = self.config
        if c.norm_n is not None:
            return c.norm_n, None
        if c.attention != "relu2" or sequences.nested is None:
            return k.shape[1], None
        own = sequences.lengths(x).to(torch.promote_types(x.dtype, torch.float32))
        return c.max_length, (c.max_length / own)[..., None, None]

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | MaskMod | None = None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim); state, rope, mask and score_mod as in Attention."""
        c = self.config
        cache = require_cache("GatedAttentionUnit", state)
        x, sequences = sequences_of("GatedAttentionUnit", "x", x, state=cache)
        require_tokens("GatedAttentionUnit", x, self.config.dim)
        u, v, z = (nn.functional.silu(p(x)) for p in (self.u_proj, self.v_proj, self.z_proj))
        q, k = (z[:, :, None, None] * self.gamma[:, None] + self.beta[:, None]).unbind(2)
        if rope is not None:
            q, k = functional.apply_rotary(
                q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
            )
        v = v[:, :, None]
        attend = sequences.attention()
        if cache is not None:
            k, v, mask, score_mod, attend = cache.extend(
                k, v, attend, mask, score_mod, positional=c.relative is not None
            )
        if c.relative == "toeplitz":
            keys = k.shape[1] if sequences.nested is None else sequences.longest
            if keys > c.max_length:
                raise ValueError(
                    "GatedAttentionUnit: keys must not exceed max_length with a toeplitz bias, "
                    f"got keys={keys}, max_length={c.max_length}"
                )
        n, ratio = self._n(x, k, sequences)
        if ratio is not None and not c.bias_inside_n:
            q = (q * ratio).to(q.dtype)
        out: Tensor = attend(
            q,
            k,
            v,
            causal=c.causal,
            mask=mask,
            scale=1 / max(n, 1) if c.attention == "relu2" else None,
            relative=self._relative(n),
            score_mod=score_mod,
            normalizer="relu2" if c.attention == "relu2" else "softmax",
            backend=c.backend,
        )
        if ratio is not None and c.bias_inside_n:
            out = (out * ratio.square()).to(out.dtype)
        return sequences.restored(self.o_proj(u * out[:, :, 0]))
