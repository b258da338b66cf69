"""NSA: attention to compressed keys, selected blocks and a window; and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.checks.tracing import may_train
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Probability, Signed, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import require_no_mask
from omniattn.modules.base.state import State, Storage, take, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.sparse.sparse_attention import QKV, SparseAttention


class Compression(nn.Module):
    """Compresses windows of NSA's keys or values: the mean, or the MLP W_2 silu(W_1 w).

    w are the concatenated vectors of a window plus learned position vectors.
    """

    @property
    def undecayed(self) -> tuple[str, ...]:
        """Position vectors, which have no weight decay."""
        return ("position",) if self.config.compress == "mlp" else ()

    def __init__(self, config: Any, device: Any, dtype: Any) -> None:
        super().__init__()
        self.config = c = config
        size = c.compress_size * c.head_size
        if c.compress == "mlp":

            def linear(n_in: int, n_out: int) -> Linear:
                config = Linear.Config(n_in, n_out, True, n_in**-0.5, c.backend)
                return Linear(config, device=device, dtype=dtype)

            self.position = nn.Parameter(
                torch.empty(c.compress_size, c.head_size, device=device, dtype=dtype)
            )
            self.up, self.down = linear(size, c.compress_dim), linear(c.compress_dim, c.head_size)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeroes the position vectors."""
        if self.config.compress == "mlp":
            nn.init.zeros_(self.position)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, Hkv, D) to (B, whole windows in T, Hkv, D)."""
        c = self.config
        short, learned = x.shape[1] < c.compress_size, c.compress == "mlp"
        if short and not (learned and may_train()):
            return x[:, :0]
        if not learned:
            return x.unfold(1, c.compress_size, c.compress_stride).mean(-1)
        if short:  # computes no rows, so that the weights have zero gradients, not None
            windows = x[:, :0].transpose(1, 2).repeat(1, 1, 1, c.compress_size)
        else:
            # Folds heads into the batch, and copies: with views or 4-D products torch.export would
            # specialise on the length.
            windows = x.unfold(1, c.compress_size, c.compress_stride).permute(0, 2, 1, 4, 3)
            windows = windows.clone(memory_format=torch.contiguous_format).flatten(-2)
        rows = windows.flatten(0, 1) + self.position.flatten()
        found: Tensor = self.down(nn.functional.silu(self.up(rows)))
        return found.unflatten(0, windows.shape[:2]).transpose(1, 2)


class NSAState:
    """Caches of NSA: keys and values per branch or shared, and compressed keys and values.

    Args:
        branches: one cache for all branches, or one each for the tokens to compress, the selected
            blocks and the window.
        compressed: cache of the compressed keys and values.
        size, stride: size and stride of the compressed windows.
    """

    def __init__(self, branches: list[Cache], compressed: Cache, size: int, stride: int) -> None:
        self.branches, self.compressed = branches, compressed
        self._size, self._stride = size, stride

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of branches, size and stride, which must match the layer's."""
        return len(self.branches), self._size, self._stride

    @property
    def limit(self) -> int | None:
        """Largest number of tokens, None if unlimited."""
        return self.branches[0].limit

    def windows(self, length: int) -> int:
        """Returns the number of whole windows in `length` tokens."""
        return max(0, (length - self._size) // self._stride + 1)

    @property
    def length(self) -> int:
        return self.branches[0].length

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._all())

    def _all(self) -> list[Cache]:
        return [*self.branches, self.compressed]

    def crop(self, length: int) -> None:
        for cache in self.branches:
            cache.crop(length)
        self.compressed.crop(self.windows(length))

    def reorder(self, index: Tensor) -> None:
        for cache in self._all():
            cache.reorder(index)

    def state_dict(self) -> dict[str, Any]:
        return {
            "branches": [cache.state_dict() for cache in self.branches],
            "compressed": self.compressed.state_dict(),
            "compress_size": self._size,
            "compress_stride": self._stride,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = "branches", "compressed", "compress_size", "compress_stride"
        branches, compressed, *windows = take("NSAState", state, *names)
        _require_sizes("NSAState", (len(branches), *windows), self.sizes)
        for cache, saved in zip(self._all(), [*branches, compressed], strict=True):
            cache.load_state_dict(saved)


def _require_sizes(op: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ValueError(
            f"{op}: state must have the branches, compress_size and compress_stride {wanted}, "
            f"got {found}"
        )


class NSA(SparseAttention):
    """Native sparse attention: computes y = W_o sum_c sigmoid(W_g x)_c O_c over causal branches.

    The three branches attend to compressed keys, to blocks selected by the compressed attention
    weights for a group of query heads, and to a window, see
    :func:`omniattn.functional.nsa_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj (three times as many outputs
        with separate_kv, in the order above), g_proj, o_proj; k_compression and v_compression with
        position (compress_size, head_dim), up and down.

    Note:
        torch.export: a dynamic T is at least compress_size + compress_stride, and more than
        block_size.

    Reference:
        Yuan et al., Native Sparse Attention, 2025, arXiv 2502.11089.

    Example:
        >>> layer = NSA(dim=32, num_heads=4, num_kv_heads=1, compress_size=4, compress_stride=2,
        ...             block_size=8, topk=3, window=8)
        >>> layer(torch.ones(1, 40, 32)).shape
        torch.Size([1, 40, 32])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim, num_heads, num_kv_heads, head_dim: as in Attention; the query heads of a group
                share their selected blocks.
            compress_size, compress_stride: numbers of tokens in a compressed key, and between
                compressed keys.
            block_size: number of tokens in a selected block.
            topk: number of blocks per query, always including the first, the query's own and the
                one before it.
            window: number of tokens in the window, including the query's own.
            compress: "mlp" or "mean".
            compress_dim: inner width of the MLPs.
            separate_kv: True for separate keys and values per branch, as in the paper; False to
                share them.
            rope_interleaved, scale, init_std, out_init_std, backend: as in Attention.
            softcap, dropout_p: as in Attention, for all branches.
        """

        compress_size: Size = 32
        compress_stride: Size = 16
        block_size: Size = 64
        topk: Size = 16
        window: Size = 512
        compress: str = "mlp"
        compress_dim: Size = 128
        separate_kv: bool = True
        rope_interleaved: bool = False
        scale: Signed | None = None
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None
        softcap: float = 0.0
        dropout_p: Probability = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("compress_size", "compress_stride")
            self._require_multiple("block_size", "compress_stride")
            if self.compress not in ("mlp", "mean"):
                raise ValueError(
                    f"NSA: compress must be one of ('mlp', 'mean'), "
                    f"got compress={shown(self.compress)}"
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
        q_dim = c.num_heads * c.head_size
        kv_dim = c.kv_heads * c.head_size * (3 if c.separate_kv else 1)

        def linear(n_in: int, n_out: int, std: float = c.init_std) -> Linear:
            config = Linear.Config(n_in, n_out, False, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        self.q_proj = linear(c.dim, q_dim)
        self.k_proj, self.v_proj = linear(c.dim, kv_dim), linear(c.dim, kv_dim)
        self.g_proj = linear(c.dim, 3 * c.num_heads)
        self.o_proj = linear(q_dim, c.dim, c.out_init_std)
        self.k_compression = Compression(c, device, dtype)
        self.v_compression = Compression(c, device, dtype)

    def new_state(  # type: ignore[override]
        self, batch: int, max_length: int, **storage: Unpack[Storage]
    ) -> NSAState:
        """Creates caches of the branches and of the compressed keys and values."""
        c = self.config

        def cache(length: int) -> Cache:
            sizes = (batch, length, c.kv_heads, c.head_size)
            return new.keys_and_values(self, self.k_proj.weight, *sizes, **storage)

        branches = [cache(max_length) for _ in range(3 if c.separate_kv else 1)]
        windows = max(0, (max_length - c.compress_size) // c.compress_stride + 1)
        return NSAState(branches, cache(windows), c.compress_size, c.compress_stride)

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
            state: from `new_state`; the new keys and values are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested), from RotaryEmbedding.
            mask: must be None; padding must be at the end of the sequences.
        """
        require_no_mask("NSA", mask)
        return self._run(x, state, rope, mask)

    def _cache_of(self, state: State | None) -> Any:
        if state is None:
            return None
        if not isinstance(state, NSAState):
            raise TypeError(f"NSA: state must be an NSAState, got {type(state).__name__}")
        c = self.config
        branches = 3 if c.separate_kv else 1
        _require_sizes("NSA", state.sizes, (branches, c.compress_size, c.compress_stride))
        return state

    def _with_past(self, cache: Any, x: Tensor, *sets: QKV) -> tuple[Tensor, ...]:
        """Returns q, the gates, and keys and values per branch, or one pair for all branches."""
        c, ((q, k, v),) = self.config, sets
        pairs = list(zip(k.split(c.kv_heads, 2), v.split(c.kv_heads, 2), strict=True))
        if cache is not None:
            pairs = [own.append(*pair) for own, pair in zip(cache.branches, pairs, strict=True)]
        gates = torch.sigmoid(self.g_proj(x)).unflatten(-1, (c.num_heads, 3))
        return q, gates, *(t for pair in pairs for t in pair)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c, (q, gates, *pairs) = self.config, tensors
        compressed = self._compressed(pairs[0], pairs[1], given["cache"])
        return functional.nsa_attention(
            *(q, *(pairs[2:4] or pairs), *compressed, gates),
            k_window=pairs[-2],
            v_window=pairs[-1],
            compress_size=c.compress_size,
            compress_stride=c.compress_stride,
            block_size=c.block_size,
            topk=c.topk,
            window=c.window,
            **self._score_options(),
        )

    def _compressed(self, k: Tensor, v: Tensor, state: NSAState | None) -> tuple[Tensor, Tensor]:
        """Compresses the keys and values of all tokens; a state caches earlier results."""
        if state is None:
            return self.k_compression(k), self.v_compression(v)
        first = state.compressed.length * self.config.compress_stride
        return state.compressed.append(
            self.k_compression(k[:, first:]), self.v_compression(v[:, first:])
        )
