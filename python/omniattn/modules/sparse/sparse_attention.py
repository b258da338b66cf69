"""Base class of attention layers with a static pattern: projections, rotation, cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Probability, Signed
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import Mixer, require_tokens
from omniattn.modules.base.state import State, Storage, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache, require_cache

#: Queries, keys and values of one set of projections.
QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class SparseConfig(HeadsConfig):
    """Common sizes and options of sparse attention layers.

    Args:
        dim: width of x and y.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
        head_dim: width of a head, default dim / num_heads.
        bias, out_bias: True for biases of the input projections; of o_proj.
        rope_interleaved: True for rotary pairs (2i, 2i + 1) instead of (i, i + Dr / 2).
        scale: factor of the scores, default 1 / sqrt(head_dim).
        init_std, out_init_std: standard deviations of the weights, and of o_proj's.
        backend: backend of all ops of the layer.
        softcap, dropout_p: as in Attention.
    """

    bias: bool = False
    out_bias: bool = False
    rope_interleaved: bool = False
    scale: Signed | None = None
    init_std: float = 0.02
    out_init_std: float = 0.02
    backend: Backend = None
    softcap: float = 0.0
    dropout_p: Probability = 0.0


class SparseAttention(Mixer):
    """Computes y = W_o attend(W_q x, W_k x, W_v x); subclasses define `_attend`.

    `_run` is the common forward. Subclasses can override its steps: check of the cache,
    projections, rotation, appending to the cache, output.

    A layer can have a second set of projections for global tokens; its cache then stores the keys
    and values of both sets.
    """

    config: Any

    @property
    def _second(self) -> bool:
        """True if the layer has a second set of projections."""
        return False

    @property
    def _projects_out(self) -> bool:
        """True if the layer has an o_proj."""
        return True

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        c = self.config
        sizes = {"q": c.num_heads * c.head_size, "k": c.kv_heads * c.head_size}
        sizes["v"] = sizes["k"]

        def linear(n_in: int, n_out: int, bias: bool, std: float) -> Linear:
            config = Linear.Config(n_in, n_out, bias, std, c.backend)
            return Linear(config, device=device, dtype=dtype)

        for suffix in ("proj", "global_proj") if self._second else ("proj",):
            for name, size in sizes.items():
                self.add_module(f"{name}_{suffix}", linear(c.dim, size, c.bias, c.init_std))
        if self._projects_out:
            self.o_proj = linear(sizes["q"], c.dim, c.out_bias, c.out_init_std)

    @property
    def _key_weight(self) -> Tensor:
        return cast(Linear, self.get_submodule("k_proj")).weight

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Cache:
        """Creates a cache.

        Args:
            batch, max_length: number of sequences and largest number of tokens.
            device, dtype: device and dtype of the storage; default: those of the parameters.
        """
        c = self.config
        self._require_causal()
        sizes = (batch, max_length, c.kv_heads * (2 if self._second else 1), c.head_size)
        return new.keys_and_values(self, self._key_weight, *sizes, **storage)

    def _require_causal(self) -> None:
        if not getattr(self.config, "causal", True):
            op = type(self).__name__
            raise ValueError(f"{op}: a state must have causal=True, got causal=False")

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
            x: new tokens. For a jagged nested tensor the result is jagged, and each sequence
                attends only to itself.
            state: a Cache, to which the new keys and values are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested), from RotaryEmbedding.
            mask: must be None; the pattern is the mask.
        """
        return self._run(x, state, rope, mask)

    def _run(
        self,
        x: Tensor,
        state: State | None,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | Mask | None,
        **given: Any,
    ) -> Tensor:
        op = type(self).__name__
        cache = self._cache_of(state)
        x, sequences = sequences_of(op, "x", x, state=cache)
        require_tokens(op, x, self.config.dim)
        if mask is not None or getattr(cache, "mask", None) is not None:
            raise ValueError(f"{op}: mask must be None, the pattern is the mask")
        if sequences.nested is not None and given.get("key_padding") is not None:
            raise ValueError(f"{op}: key_padding must be None where x is nested, got a tensor")
        if cache is not None:
            self._require_causal()
        past = 0 if cache is None else cache.length

        def at() -> Tensor:
            return sequences.positions(x) + past

        suffixes = ("proj", "global_proj") if self._second else ("proj",)
        sets = [self._projected(x, suffix, rope, at) for suffix in suffixes]
        tensors = self._with_past(cache, x, *sets)
        outs = [
            self._attend(*part, x=own, cache=cache, **self._of_sequence(row, given))
            for row, (*part, own) in sequences.each(*tensors, x)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        return sequences.restored(self._output(out.flatten(-2), x))

    def _cache_of(self, state: State | None) -> Any:
        """Requires a state that fits the layer, and returns it."""
        return require_cache(type(self).__name__, state)

    def _of_sequence(self, row: slice, given: dict[str, Any]) -> dict[str, Any]:
        """Selects the arguments of a call for the sequences `row` of its batch."""
        return given

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        """Maps the heads' outputs (B, T, Hq D) to y (B, T, dim)."""
        y: Tensor = self.o_proj(out)
        return y

    def _projected(
        self,
        x: Tensor,
        suffix: str,
        rope: tuple[Tensor, Tensor] | None,
        at: Callable[[], Tensor],
    ) -> QKV:
        """Computes rotated q, k and v of a set of projections; `at` returns x's positions (T,)."""
        size = self.config.head_size
        q, k, v = (
            self.get_submodule(f"{name}_{suffix}")(x).unflatten(-1, (-1, size)) for name in "qkv"
        )
        q, k = self._rotated(q, k, rope, at)
        return q, k, v

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        at: Callable[[], Tensor],
    ) -> tuple[Tensor, Tensor]:
        if rope is None:
            return q, k
        c = self.config
        turned: tuple[Tensor, Tensor] = functional.apply_rotary(
            q, k, *rope, interleaved=c.rope_interleaved, backend=c.backend
        )
        return turned

    def _with_past(self, cache: Any, x: Tensor, *sets: QKV) -> tuple[Tensor, ...]:
        """Returns the arguments of `_attend`: queries, and keys and values of all tokens."""
        if cache is None:
            return tuple(t for each in sets for t in each)
        if len(sets) == 1:
            q, k, v = sets[0]
            return q, *cache.append(k, v)
        k, v = cache.append(*(torch.cat([each[i] for each in sets], 2) for i in (1, 2)))
        first, second = sets
        heads = first[1].shape[2]
        return (
            *(first[0], k[:, :, :heads], v[:, :, :heads]),
            *(second[0], k[:, :, heads:], v[:, :, heads:]),
        )

    def _score_options(self) -> dict[str, Any]:
        """Returns the score and dropout options common to all functions."""
        c = self.config
        return {
            "scale": c.scale,
            "softcap": c.softcap,
            "dropout_p": c.dropout_p if self.training else 0.0,
            "backend": c.backend,
        }

    @abstractmethod
    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        """Computes the heads' outputs (B, Tq, Hq, D) from the tensors of `_with_past`.

        x are the new tokens; `given` holds `cache` and the arguments of `_run`.
        """
