"""Compressed sparse attention of DeepSeek-V4: a window, and compressed keys of earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.tracing import may_train
from omniattn.functional.masks import Mask, PooledKeys
from omniattn.modules.base.fields import Backend, Epsilon, Probability, Size, SizeOrZero
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear, weight_of
from omniattn.modules.base.mixer import Mixer, require_no_mask, require_tokens
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.compressed import CSAState
from omniattn.modules.experts.auxiliary import AuxiliaryLoss
from omniattn.modules.sparse.compressor import CompressedIndexer, Compressor, Tables, rotated


class CompressedSparseAttention(Mixer, AuxiliaryLoss):
    """Attention of DeepSeek-V4: to a window of keys, and to compressed keys of earlier tokens.

    ``y = W_ob W_oa R_t^-1 softmax(s q [k_near; C])[k_near; C]`` with a learned sink for each head.
    All heads share one head of keys, which are the values too; as these are rotated, the output is
    rotated back. Queries come from a normalised latent, and W_oa is block-diagonal over groups of
    heads. A compressed key C_w stands for a window of `compress_rate` tokens, from the last of
    which on it is visible. With `index_topk` (compressed sparse attention, CSA) an indexer selects
    compressed keys for each query, trained by its own loss as in DeepSeekSparseAttention; without
    it (heavily compressed attention, HCA) queries attend to all. No (T, T) tensor is made.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_a_proj, q_a_norm, q_b_proj, kv_proj, kv_norm,
        sinks, o_a_proj, o_b_proj, compressor and compressor.indexer, as in DeepSeek-V4 in
        transformers.

    Note:
        torch.export: a dynamic T is at least compress_rate, and with index_topk more than
        index_topk compress_rate.

    Reference:
        DeepSeek-AI, DeepSeek-V4, 2026, section 2.3. Verified against transformers.

    Example:
        >>> sizes = {"head_dim": 8, "q_lora_rank": 16, "rope_dim": 0, "o_groups": 2}
        >>> layer = CompressedSparseAttention(
        ...     dim=32, num_heads=4, o_lora_rank=8, window=4, compress_rate=2, index_topk=3, **sizes
        ... )
        >>> layer(torch.ones(1, 10, 32)).shape
        torch.Size([1, 10, 32])
    """

    auxiliary_name = "indexer"

    #: Sinks have no weight decay.
    undecayed = ("sinks",)

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            head_dim: size of a head.
            q_lora_rank: size of the queries' latent.
            rope_dim: number of rotated dimensions, the last of a head; 0 for no positions.
            o_groups, o_lora_rank: number of groups of heads whose outputs are projected apart, and
                size of each of these projections.
            window: number of tokens in the window, including the query's own.
            compress_rate: number of tokens for which a compressed key stands.
            overlap: True if a compressed key also reads the tokens of the window before (CSA).
            index_topk: number of compressed keys per query; None for all (HCA).
            index_heads, index_dim: number of the indexer's heads, and size of its queries and keys.
            index_weight: weight of the indexer's loss, see DeepSeekSparseAttention.
            norm_eps, dropout_p, init_std, out_init_std, backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        head_dim: Size
        q_lora_rank: Size
        rope_dim: SizeOrZero
        o_groups: Size
        o_lora_rank: Size
        window: Size = 128
        compress_rate: Size = 4
        overlap: bool = True
        index_topk: Size | None = 512
        index_heads: Size = 64
        index_dim: Size = 128
        index_weight: float = 1.0
        norm_eps: Epsilon = 1e-6
        dropout_p: Probability = 0.0
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "CompressedSparseAttention"
            least = self.head_dim if self.index_topk is None else min(self.head_dim, self.index_dim)
            if self.rope_dim % 2 or self.rope_dim > least:
                raise ValueError(
                    f"{op}: rope_dim must be even and at most head_dim and index_dim, "
                    f"got rope_dim={self.rope_dim}, head_dim={self.head_dim}, "
                    f"index_dim={self.index_dim}"
                )
            if self.num_heads % self.o_groups:
                raise ValueError(
                    f"{op}: o_groups must divide num_heads, "
                    f"got o_groups={self.o_groups}, num_heads={self.num_heads}"
                )

        @property
        def rotary_dim(self) -> int:
            """Number of dimensions of a head that rotary embeddings rotate."""
            return self.rope_dim

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

        def linear(n_in: int, n_out: int, std: float = c.init_std) -> Linear:
            return Linear(Linear.Config(n_in, n_out, False, std, c.backend), **factory)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(RMSNorm.Config(size, c.norm_eps, backend=c.backend), **factory)

        q_dim = c.num_heads * c.head_dim
        self.q_a_proj, self.q_a_norm = linear(c.dim, c.q_lora_rank), norm(c.q_lora_rank)
        self.q_b_proj = linear(c.q_lora_rank, q_dim)
        self.kv_proj, self.kv_norm = linear(c.dim, c.head_dim), norm(c.head_dim)
        self.sinks = nn.Parameter(torch.empty(c.num_heads, **factory))
        self.compressor = Compressor(c, c.head_dim, device, dtype)
        if c.index_topk is not None:
            self.compressor.indexer = CompressedIndexer(c, device, dtype)
        self.o_a_proj = linear(q_dim // c.o_groups, c.o_groups * c.o_lora_rank)
        self.o_b_proj = linear(c.o_groups * c.o_lora_rank, c.dim, c.out_init_std)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeroes the sinks."""
        nn.init.zeros_(self.sinks)

    @property
    def auxiliary_weight(self) -> float:
        return float(self.config.index_weight)

    @property
    def _compressors(self) -> list[Compressor]:
        own = self.compressor
        return [own] if self.config.index_topk is None else [own, own.indexer]

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> CSAState:
        """Creates caches of the window, of compressed keys, and of what the next ones read."""
        c = self.config
        return new.with_compressed_keys(
            *(self, self.kv_proj.weight, batch, max_length),
            {
                "head_dim": c.head_dim,
                "index_dim": 0 if c.index_topk is None else c.index_dim,
                "window": c.window,
                "compress_rate": c.compress_rate,
                "overlap": c.overlap,
                "width": sum(each.width for each in self._compressors),
                "rope_dim": c.rope_dim,
            },
            **storage,
        )

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: the tokens after those in `state`. For a jagged nested tensor the result is jagged,
                and each sequence attends only to itself.
            state: from `new_state`; the new tokens are appended.
            rope: (cos, sin) at the positions of x, (T, rope_dim / 2) or (B, T, rope_dim / 2), or of
                x.values() if x is nested.
            mask: must be None; padding must be at the end of the sequences.
        """
        op, c = "CompressedSparseAttention", self.config
        require_no_mask(op, mask)
        caches = self._require_state(state)
        x, sequences = sequences_of(op, "x", x, state=state)
        require_tokens(op, x, c.dim)
        tables = self._tables(x, rope)
        latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(latent).unflatten(-1, (c.num_heads, -1))
        q = functional.rms_norm(q, eps=c.norm_eps, backend=c.backend)
        k = self.kv_norm(self.kv_proj(x))[:, :, None]
        q, k = (rotated(t, tables, c.backend) for t in (q, k))
        rows = zip(*(each.rows(x) for each in self._compressors), strict=True)
        values, gates = (torch.cat(parts, -1) for parts in rows)
        given = (q, k, values, gates, *(t.expand(len(x), -1, -1) for t in tables))
        if c.index_topk is not None:
            given += self.compressor.indexer.queries(x, latent, tables)
        losses: list[Tensor] = []
        out = sequences.apart(partial(self._attend, caches, losses), *given)
        self._keep(torch.cat(losses, 1).mean() if losses else None)
        out = rotated(out, tables, c.backend, inverse=True).flatten(-2)
        grouped = out.unflatten(-1, (c.o_groups, -1))
        up = weight_of(self.o_a_proj).unflatten(0, (c.o_groups, -1))
        y: Tensor = self.o_b_proj(torch.einsum("btgi,goi->btgo", grouped, up).flatten(-2))
        return sequences.restored(y)

    def _require_state(self, state: State | None) -> CSAState | None:
        op, c = "CompressedSparseAttention", self.config
        if state is None:
            return None
        if not isinstance(state, CSAState):
            raise TypeError(f"{op}: state must be a CSAState, got {type(state).__name__}")
        if (state.compress_rate, state.overlap) != (c.compress_rate, c.overlap):
            raise ValueError(
                f"{op}: state must have compress_rate={c.compress_rate} and overlap={c.overlap}, "
                f"got compress_rate={state.compress_rate}, overlap={state.overlap}"
            )
        return state

    def _tables(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tables:
        """Checks the rotary tables, and returns them with a batch: (1 | B, T, rope_dim / 2)."""
        size = self.config.rope_dim // 2
        if (rope is not None) != (size > 0) or (rope and rope[0].shape[-1] != size):
            got = "None" if rope is None else f"cos of shape {tuple(rope[0].shape)}"
            raise ValueError(
                "CompressedSparseAttention: rope must have rope_dim / 2 columns, and be None for "
                f"rope_dim=0, got rope_dim={2 * size}, rope={got}"
            )
        if rope is None:
            rope = (x.new_zeros(x.shape[1], 0),) * 2
        cos, sin = (t.to(torch.promote_types(self.sinks.dtype, torch.float32)) for t in rope)
        return (cos, sin) if cos.dim() == 3 else (cos[None], sin[None])

    def _attend(
        self,
        state: CSAState | None,
        losses: list[Tensor],
        q: Tensor,
        k: Tensor,
        values: Tensor,
        gates: Tensor,
        cos: Tensor,
        sin: Tensor,
        *scored: Tensor,
    ) -> Tensor:
        """Computes the heads' outputs (B, T, H, D).

        With the indexer's queries and weights in `scored`, attention is to the keys that it
        selects, and in training its loss is appended to `losses`.
        """
        c, past = self.config, 0 if state is None else state.length
        how: dict[str, Any] = {"return_lse": True, "backend": c.backend}
        how["dropout_p"] = c.dropout_p if self.training else 0.0
        k = k if state is None else state.append_near(k)
        keys, k_idx = self._compressed(state, values, gates, (cos, sin))
        near = functional.attention(q, k, k, causal=True, window_size=(c.window - 1, 0), **how)
        index = None
        if scored:
            q_idx, weights = scored
            index = self.compressor.indexer.chosen(q_idx, k_idx, weights, past)
        if index is None:
            seen = PooledKeys(c.compress_rate, c.compress_rate, past)
            far = functional.attention(q, keys, keys, mask=seen, **how)
        else:
            far = functional.selected_attention(q, keys, keys, index[:, None], block_size=1, **how)
        out, lse = functional.merge_attention(*zip(near, far, strict=True), sinks=self.sinks)
        if scored and self.training and may_train() and c.index_weight > 0:
            if index is None:
                index = self._visible(q, keys, past)
            losses.append(
                functional.dsa_indexer_loss(
                    *(q_idx, k_idx, weights, q.detach(), keys.detach(), lse.detach(), index),
                    causal=False,
                    backend=c.backend,
                )
            )
        return out

    def _compressed(
        self, state: CSAState | None, values: Tensor, gates: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """Returns the compressed keys (B, N, 1, D) of all tokens, and the indexer's (B, N, DI)."""
        known = 0
        if state is not None:
            values, gates, tables, known = state.append_rows(values, gates, tables)
        widths = [each.width for each in self._compressors]
        rows = zip(values.split(widths, -1), gates.split(widths, -1), strict=True)
        keys, *index = (
            compress(*own, tables, known)
            for compress, own in zip(self._compressors, rows, strict=True)
        )
        k_idx = index[0] if index else keys[..., :0]
        if state is not None:
            keys, k_idx = state.compressed.append(keys, k_idx)
        return keys, k_idx[:, :, 0]

    def _visible(self, q: Tensor, keys: Tensor, past: int) -> Tensor:
        """Returns the list (B, T, N) of all compressed keys that each query sees."""
        each = torch.arange(keys.shape[1], device=q.device)
        ends = torch.arange(past + 1, past + 1 + q.shape[1], device=q.device)
        seen = each < (ends // self.config.compress_rate)[:, None]
        return torch.where(seen, each, -1).expand(len(q), -1, -1)
