"""Compressors of DeepSeek-V4: one key for a window of tokens, for attention and its indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import widen
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm

#: cos and sin (1 | B, T, rope_dim / 2) at the positions of tokens; of width 0 without a rotation.
Tables = tuple[Tensor, Tensor]


def rotated(x: Tensor, tables: Tables, backend: str | None, *, inverse: bool = False) -> Tensor:
    """Rotates the last dimensions of x (B, T, H, D), as many as the tables have angles for."""
    size = 2 * tables[0].shape[-1]
    if size == 0:
        return x
    turned, _ = functional.apply_rotary(
        *(x, None, *tables),
        rotary_start=x.shape[-1] - size,
        interleaved=True,
        inverse=inverse,
        backend=backend,
    )
    return turned


class Compressor(nn.Module):
    """Compresses each window of `compress_rate` tokens into one key.

    ``C_w = norm(sum_t softmax_t(z_t + b_t) c_t)`` for each channel, with values c and gates z
    projected from x and biases b by the place in the window; C_w is rotated at the position of the
    window's first token. With `overlap` a token has two rows of values and gates: one for its own
    window's key and one for that of the next, so that a key reads two windows.
    """

    #: Biases by place, which have no weight decay.
    undecayed = ("position_bias",)
    #: Indexer of CSA, set by the attention: transformers' place of its parameters.
    indexer: CompressedIndexer

    def __init__(self, config: Any, size: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.config, self.size = config, size
        self.width = size * (2 if config.overlap else 1)
        self.kv_proj = self._linear(config.dim, self.width, device, dtype)
        self.gate_proj = self._linear(config.dim, self.width, device, dtype)
        shape = (config.compress_rate, self.width)
        self.position_bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        norm = RMSNorm.Config(size, config.norm_eps, backend=config.backend)
        self.kv_norm = RMSNorm(norm, device=device, dtype=dtype)
        self.reset_parameters()

    def _linear(self, n_in: int, n_out: int, device: Any, dtype: Any) -> Linear:
        config = Linear.Config(n_in, n_out, False, self.config.init_std, self.config.backend)
        return Linear(config, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Zeroes the biases."""
        nn.init.zeros_(self.position_bias)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns values and gates (B, T, width) of the tokens x (B, T, dim)."""
        return self.kv_proj(x), self.gate_proj(x)

    def forward(self, values: Tensor, gates: Tensor, tables: Tables, known: int = 0) -> Tensor:
        """Maps rows (B, T, width) from the start of a window on to keys (B, windows, 1, size).

        The first `known` windows have no key: only the next one reads their rows.
        """
        rate = self.config.compress_rate
        count = values.shape[1] // rate
        whole = slice(0, count * rate)
        values, gates = (t[:, whole].unflatten(1, (count, rate)) for t in (values, gates))
        gates = widen(gates) + self.position_bias
        if self.config.overlap:
            values, gates = self._with_previous(values, 0.0), self._with_previous(gates, -torch.inf)
        pooled = (gates.softmax(2) * values).sum(2)[:, known:].to(values.dtype)
        cos, sin = (t[:, whole][:, ::rate][:, known:] for t in tables)
        return rotated(self.kv_norm(pooled)[:, :, None], (cos, sin), self.config.backend)

    def _with_previous(self, rows: Tensor, none: float) -> Tensor:
        """Joins the rows (B, n, rate, 2 size) that a key reads: (B, n, 2 rate, size).

        They are the first halves of the window before, `none` for the first one, and the second
        halves of its own.
        """
        before, own = rows.split(self.size, -1)
        before = nn.functional.pad(before, (0, 0, 0, 0, 1, 0), value=none)[:, :-1]
        return torch.cat([before, own], 2)


class CompressedIndexer(Compressor):
    """Compressed keys, queries and weights of the scores that select compressed keys.

    ``I_tw = sum_h a_th relu(q_th . C_w)``, see :func:`omniattn.functional.dsa_indexer`. All are
    detached from x and the latent: only the indexer's own loss trains it.
    """

    def __init__(self, config: Any, device: Any, dtype: Any) -> None:
        c = config
        super().__init__(c, c.index_dim, device, dtype)
        self.q_b_proj = self._linear(c.q_lora_rank, c.index_heads * c.index_dim, device, dtype)
        weights = self._linear(c.dim, c.index_heads, device, dtype)
        self.scorer = nn.ModuleDict({"weights_proj": weights})  # transformers' name

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().rows(x.detach())

    def queries(self, x: Tensor, latent: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Maps x (B, T, dim) and the queries' latent to q (B, T, H, index_dim), a (B, T, H)."""
        c = self.config
        q = self.q_b_proj(latent.detach()).unflatten(-1, (c.index_heads, -1))
        weights = self.scorer["weights_proj"](x.detach()) * (c.index_heads * c.index_dim) ** -0.5
        return rotated(q, tables, c.backend), weights

    def chosen(self, q: Tensor, k: Tensor, weights: Tensor, past: int) -> Tensor | None:
        """Selects keys (B, T, index_topk) of the windows that end before or at each query.

        k (B, N, index_dim) are the keys of all windows; the first query is at position `past`.
        Returns None where N is at most index_topk, since each query then sees all of its keys.
        """
        c = self.config
        if k.shape[1] <= c.index_topk:
            return None
        return functional.dsa_indexer(
            *(q, k, weights, c.index_topk),
            key_stride=c.compress_rate,
            past=past,
            backend=c.backend,
        )
