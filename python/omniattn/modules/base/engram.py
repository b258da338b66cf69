"""Engram: hashed embeddings of n-grams, gated by the context."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_tensor, shown, widen
from omniattn.checks.ranks import ACTIVE
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear

#: Least size of a gate's score under the root.
_LEAST = 1e-6
#: Weights of norms.
_SCALES = ("key_scale", "query_scale", "conv_scale")


class Engram(Layer):
    """Looks up embeddings of the n-grams that end at a token, and gates them by its hidden state.

    ``e`` has the rows of all tables at :func:`functional.ngram_hashes` of the tokens. With
    ``s = norm(W_k e) . norm(x) / sqrt(dim)`` and ``a = sigmoid(sign(s) sqrt(|s|))``, it returns
    ``y = v + silu(conv(norm(v)))``, ``v = a W_v e``, which the caller adds to x. The convolution is
    depthwise and causal, with N - 1 tokens left out between its taps.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim), or (B, T, num_streams, dim) of several residual streams, each with a gate of
        its own; tokens (B, T) int64 -> like x, and the state after x: the last N - 1 tokens and
        inputs of the convolution (B, num_streams dim, (kernel_size - 1) N).
        Parameters table, key_proj, value_proj, conv_weight (num_streams dim, 1, kernel_size);
        key_scale, query_scale, conv_scale (num_streams, dim), the weights of the norms. Buffers
        multipliers, sizes and offsets, stored in state_dict.

    Note:
        The authors first map tokens that differ in case or accents to one number; `tokens` are
        these numbers. Their gates' norms have the eps of the dtype. Their multipliers come from
        numpy's generator, these from torch's, and are part of a checkpoint.

    Reference:
        DeepSeek-AI, Conditional Memory via Scalable Lookup, 2026, arXiv 2601.07372. Verified
        against engram_demo_v1.py of deepseek-ai/Engram at commit 11a020e.

    Example:
        >>> layer = Engram(dim=8, vocab_size=32, table_sizes=(50, 50), ngram_dim=16)
        >>> y, state = layer(torch.ones(1, 5, 8), torch.arange(5)[None])
        >>> y.shape, [tuple(t.shape) for t in state]
        (torch.Size([1, 5, 8]), [(1, 2), (1, 8, 9)])
    """

    #: Parameters without weight decay.
    undecayed: ClassVar[tuple[str, ...]] = ("table", "key_scale", "query_scale", "conv_scale")

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            vocab_size: number of tokens.
            table_sizes: least number of rows of a table for n = 2, ..., N; each of the num_heads
                tables has a prime number of rows of its own.
            ngram_dim: size of the embedding of an n-gram, the rows of num_heads tables.
            num_heads: number of tables, and hashes, for each n.
            kernel_size: number of taps of the convolution.
            num_streams: number of residual streams.
            layer_idx: number of the layer, by which hashes and primes differ.
            layer_ids: numbers of all layers of the model with n-grams, including layer_idx.
            pad: token in place of those before a sequence.
            seed: seed of the multipliers.
            norm_eps, init_std, backend: as in Attention.
        """

        dim: Size
        vocab_size: Size
        table_sizes: tuple[int, ...]
        ngram_dim: Size = 512
        num_heads: Size = 8
        kernel_size: Size = 4
        num_streams: Size = 1
        layer_idx: int = field(default=0, kw_only=True)
        layer_ids: tuple[int, ...] = field(default=(0,), kw_only=True)
        pad: int = field(default=0, kw_only=True)
        seed: int = field(default=0, kw_only=True)
        norm_eps: Epsilon = field(default=1e-5, kw_only=True)
        init_std: float = field(default=0.02, kw_only=True)
        backend: Backend = field(default=None, kw_only=True)

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.table_sizes or min(self.table_sizes) < 1:
                raise ValueError(
                    "Engram: table_sizes must have a number >= 1 for each n = 2, ..., N, "
                    f"got table_sizes={shown(self.table_sizes)}"
                )
            if self.ngram_dim % self.num_heads:
                raise ValueError(
                    "Engram: ngram_dim must be a multiple of num_heads, "
                    f"got ngram_dim={self.ngram_dim}, num_heads={self.num_heads}"
                )
            if self.layer_idx not in self.layer_ids:
                raise ValueError(
                    "Engram: layer_ids must include layer_idx, "
                    f"got layer_idx={self.layer_idx}, layer_ids={shown(self.layer_ids)}"
                )

        @property
        def longest(self) -> int:
            """N, the number of tokens of the longest n-grams."""
            return len(self.table_sizes) + 1

        @property
        def primes(self) -> tuple[tuple[int, ...], ...]:
            """Numbers of rows of this layer's tables, for each n."""
            known: set[int] = set()
            rows: tuple[tuple[int, ...], ...] = ()
            for layer in self.layer_ids:
                rows = tuple(self._next(size, known) for size in self.table_sizes)
                if layer == self.layer_idx:
                    break
            return rows

        def _next(self, size: int, known: set[int]) -> tuple[int, ...]:
            """Adds the next num_heads primes >= size to those that are known."""
            found: list[int] = []
            while len(found) < self.num_heads:
                if size not in known and _is_prime(size):
                    found.append(size)
                size += 1
            known.update(found)
            return tuple(found)

    key_scale: Tensor
    query_scale: Tensor
    conv_scale: Tensor
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor

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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        primes = c.primes
        sizes = torch.tensor(primes)
        ends = sizes.flatten().cumsum(0)
        generator = torch.Generator().manual_seed(c.seed + 10007 * c.layer_idx)
        bound = max(1, torch.iinfo(torch.int64).max // c.vocab_size // 2)
        drawn = torch.randint(bound, (c.longest,), generator=generator, device="cpu")
        self.register_buffer("multipliers", (2 * drawn + 1).to(device=device))
        self.register_buffer("sizes", sizes.to(device=device))
        self.register_buffer("offsets", (ends - sizes.flatten()).view_as(sizes).to(device=device))
        rows, width = sum(map(sum, primes)), c.ngram_dim // c.num_heads
        self.table = nn.Parameter(torch.empty(rows, width, **factory))
        wide = (c.longest - 1) * c.ngram_dim
        linear = [
            Linear.Config(wide, n, True, c.init_std, c.backend)
            for n in (c.num_streams * c.dim, c.dim)
        ]
        self.key_proj = Linear(linear[0], **factory)
        self.value_proj = Linear(linear[1], **factory)
        for name in _SCALES:
            scale = nn.Parameter(torch.empty(c.num_streams, c.dim, **factory))
            self.register_parameter(name, scale)
        taps = torch.empty(c.num_streams * c.dim, 1, c.kernel_size, **factory)
        self.conv_weight = nn.Parameter(taps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, init_std^2) and taps as torch.nn.Conv1d; sets norms to 1."""
        nn.init.normal_(self.table, std=self.config.init_std)
        bound = self.config.kernel_size**-0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        for name in _SCALES:
            nn.init.ones_(self.get_parameter(name))

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns y, to be added to x, and the state after x.

        Args:
            x: (B, T, dim), or (B, T, num_streams, dim).
            tokens: (B, T) int64, the tokens at x.
            state: that after the tokens before x, None for a new sequence.
            cu_seqlens: boundaries of packed sequences as in functional.causal_conv1d; the states
                have a row for each sequence.
        """
        c = self.config
        require_tensor("Engram", "x", x)
        require_tensor("Engram", "tokens", tokens)
        shape = (*tokens.shape, c.dim) if x.ndim == 3 else (*tokens.shape, c.num_streams, c.dim)
        if x.shape != shape or (x.ndim == 3 and c.num_streams > 1):
            raise ValueError(
                f"Engram: x must have shape (B, T, dim), or (B, T, num_streams, dim), of tokens "
                f"(B, T), got x.shape={tuple(x.shape)}, tokens.shape={tuple(tokens.shape)}, "
                f"dim={c.dim}, num_streams={c.num_streams}"
            )
        if ACTIVE.region is not None:
            ACTIVE.region.require("Engram")
        before, inputs = (None, None) if state is None else state
        hashes, before = self._hashes(tokens, before, cu_seqlens)
        rows = nn.functional.embedding(hashes + self.offsets, self.table).flatten(2)
        gated = self._gate(x, self.key_proj(rows)) * self.value_proj(rows)[:, :, None]
        normed = self._normed(gated, self.conv_scale).flatten(2)
        y, inputs = functional.causal_conv1d(
            normed,
            self._taps(),
            activation="silu",
            initial_state=None if inputs is None else inputs.to(normed.dtype),
            cu_seqlens=cu_seqlens,
            return_final_state=True,
            backend=c.backend,
        )
        return (gated.flatten(2) + y).view_as(x), (before, inputs)

    def _hashes(
        self, tokens: Tensor, before: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the hashes at all tokens, and the last N - 1 tokens of each sequence."""
        c, steps = self.config, tokens.shape[1]
        count, more = len(tokens) if cu_seqlens is None else len(cu_seqlens) - 1, c.longest - 1
        given = (self.multipliers, self.sizes)
        if before is None:
            before = tokens.new_full((count, more), c.pad)
        if cu_seqlens is None:
            hashes = functional.ngram_hashes(tokens, *given, pad=c.pad, before=before)
            return hashes, torch.cat((before, tokens), 1)[:, steps:]
        # Each sequence follows its earlier tokens in one longer row.
        ends = cu_seqlens.long()
        starts = ends + more * torch.arange(count + 1, device=tokens.device)
        places = torch.arange(steps, device=tokens.device)
        places = places + more * torch.searchsorted(ends[1:], places, right=True) + more
        ahead = torch.arange(more, device=tokens.device)
        whole = tokens.new_zeros(steps + more * count)
        whole = whole.index_copy(0, (starts[:-1, None] + ahead).flatten(), before.flatten())
        whole = whole.index_copy(0, places, tokens[0])
        hashes = functional.ngram_hashes(whole[None], *given, pad=c.pad, cu_seqlens=starts)
        return hashes[:, places], whole[starts[1:, None] - more + ahead]

    def _normed(self, t: Tensor, scale: Tensor) -> Tensor:
        """Computes RMSNorms of t (B, T, num_streams, dim)."""
        c = self.config
        return functional.rms_norm(t, eps=c.norm_eps, backend=c.backend) * scale

    def _gate(self, x: Tensor, key: Tensor) -> Tensor:
        """Computes gates (B, T, num_streams, 1) of x's dtype from keys."""
        c = self.config
        key = self._normed(key.unflatten(-1, (c.num_streams, c.dim)), self.key_scale)
        query = self._normed(x.reshape(key.shape), self.query_scale)
        score = (widen(key) * widen(query)).sum(-1, keepdim=True) / math.sqrt(c.dim)
        root = score.abs().clamp_min(_LEAST).sqrt() * score.sign()
        return root.sigmoid().to(key.dtype)

    def _taps(self) -> Tensor:
        """Returns filters (num_streams dim, (kernel_size - 1) N + 1) with zeros between taps."""
        c = self.config
        weight = self.conv_weight[:, 0]
        spread = weight.new_zeros(len(weight), c.kernel_size, c.longest)
        spread = torch.cat((weight[..., None], spread[..., 1:]), -1).flatten(1)
        return spread[:, : (c.kernel_size - 1) * c.longest + 1]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
