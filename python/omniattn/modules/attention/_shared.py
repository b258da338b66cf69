"""Keys and values that layers of Attention share, and their projections by tensor products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import shown
from omniattn.modules.base.linear import Linear
from omniattn.modules.caches.cache import Reading

FIRST_VALUES, KEYS_AND_VALUES = "attention_first_values", "attention_keys_and_values"


class TensorProduct(nn.Module):
    """Computes y = A(x) B(x) / rank: a matrix (heads, head_dim) as a sum of products per token.

    Args:
        dim, heads, head_dim, rank: sizes.
        init_std: standard deviation of the initial weights.
        backend: backend of the products with the weights.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        rank: int,
        init_std: float,
        backend: str | None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.heads, self.rank = heads, rank
        self.a = Linear(Linear.Config(dim, heads * rank, False, init_std, backend), **factory)
        self.b = Linear(Linear.Config(dim, rank * head_dim, False, init_std, backend), **factory)

    def rows(self, x: Tensor) -> Tensor:
        """Returns B(x) (..., rank, head_dim), which rotates and is cached as heads are."""
        y: Tensor = self.b(x)
        return y.unflatten(-1, (self.rank, -1))

    def joined(self, x: Tensor, rows: Tensor) -> Tensor:
        """Returns A(x) and the rows as one head (..., 1, rank (heads + head_dim))."""
        return torch.cat([self.a(x), rows.flatten(-2)], -1).unsqueeze(-2)

    def product(self, joined: Tensor) -> Tensor:
        """Returns the heads (..., heads, head_dim) of joined factors."""
        size = self.heads * self.rank
        a, b = joined.squeeze(-2).tensor_split([size], -1)
        a, b = a.unflatten(-1, (self.heads, -1)), b.unflatten(-1, (self.rank, -1))
        return a @ b / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., dim) to (..., heads head_dim)."""
        return self.product(self.joined(x, self.rows(x))).flatten(-2)

    def width(self, head_dim: int) -> int:
        """Returns the number of cached numbers per token."""
        return self.rank * (self.heads + head_dim)


def check_sharing(c: Any) -> None:
    """Raises if options of a config of Attention that share or factor keys and values exclude each
    other."""
    for name, value, known in (
        ("value_residual", c.value_residual, (None, "first", "later")),
        ("shared_kv", c.shared_kv, (None, "source", "reader")),
    ):
        if value not in known:
            raise ValueError(f"Attention: {name} must be one of {known}, got {name}={shown(value)}")
    shares = c.value_residual is not None or c.shared_kv is not None
    if shares and c.cross:
        raise ValueError("Attention: value_residual and shared_kv must be None with cross=True")
    if c.shared_kv is not None and (c.forget_gate or c.chunk_size or c.value_residual):
        raise ValueError(
            "Attention: shared_kv needs no forget_gate, chunk_size and value_residual, got "
            f"forget_gate={c.forget_gate}, chunk_size={c.chunk_size}, "
            f"value_residual={shown(c.value_residual)}"
        )
    if c.ranks is None:
        return
    ranks = c.ranks
    if not isinstance(ranks, tuple) or len(ranks) != 3 or not all(type(r) is int for r in ranks):
        raise TypeError(f"Attention: ranks must be three ints, got ranks={shown(ranks)}")
    if min(ranks) < 1:
        raise ValueError(f"Attention: ranks must be at least 1, got ranks={ranks}")
    alone = c.qk_norm is None and c.q_rank is None and not c.bias and not c.cross
    if not alone or shares or c.forget_gate:
        raise ValueError(
            "Attention: ranks needs self-attention without qk_norm, q_rank, bias, forget_gate, "
            f"value_residual and shared_kv, got ranks={ranks}, qk_norm={shown(c.qk_norm)}, "
            f"q_rank={c.q_rank}, bias={c.bias}, cross={c.cross}, forget_gate={c.forget_gate}, "
            f"value_residual={shown(c.value_residual)}, shared_kv={shown(c.shared_kv)}"
        )


def tensor_products(c: Any, q_init_std: float, **factory: Any) -> list[TensorProduct]:
    """Builds the projections of queries, keys and values of these ranks."""
    heads, stds = (c.num_heads, c.kv_heads, c.kv_heads), (q_init_std, c.init_std, c.init_std)
    return [
        TensorProduct(c.dim, count, c.head_size, rank, std, c.backend, **factory)
        for count, rank, std in zip(heads, c.ranks, stds, strict=True)
    ]


def own_rows(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values (B, T, Hkv, D) to rotate and to cache.

    They are rows B(x) with `ranks`, and have no heads in a reader of others' keys.
    """
    c = layer.config
    if c.ranks is not None:
        return layer.k_factors.rows(x), layer.v_factors.rows(x)
    if c.shared_kv == "reader":
        none = layer.o_proj.weight.new_zeros(*x.shape[:2], 0, c.head_size)
        return none, none
    rows: tuple[Tensor, Tensor] = layer._keys_and_values(x)
    return rows


def mixed_values(layer: Any, v: Tensor, shared: dict[str, Any] | None) -> Tensor:
    """Publishes the values of the first layer, or adds them to a later layer's own."""
    kind = layer.config.value_residual
    if kind is None:
        return v
    shared = _require_shared("value_residual", kind, shared)
    if kind == "first":
        shared[FIRST_VALUES] = v
        return v
    first = _published("value_residual", "first", shared, FIRST_VALUES)
    weights = layer.value_mix.to(v.dtype)
    return weights[0] * first + weights[1] * v


def shared_reading(layer: Any, own: Reading, shared: dict[str, Any] | None) -> Reading:
    """Returns the inputs of attention of a layer whose own keys and values are in `own`.

    Factors are multiplied. A source publishes its reading, which a reader takes.
    """
    kind = layer.config.shared_kv
    if layer.config.ranks is not None:
        k, v = layer.k_factors.product(own.k), layer.v_factors.product(own.v)
        return own._replace(k=k, v=v)
    if kind is None:
        return own
    shared = _require_shared("shared_kv", kind, shared)
    if kind == "source":
        shared[KEYS_AND_VALUES] = own
        return own
    found: Reading = _published("shared_kv", "source", shared, KEYS_AND_VALUES)
    return found


def published(c: Any) -> tuple[str, ...]:
    """Returns the names that a layer of this config writes into `shared`."""
    names = {FIRST_VALUES: c.value_residual == "first", KEYS_AND_VALUES: c.shared_kv == "source"}
    return tuple(name for name, given in names.items() if given)


def read(c: Any) -> tuple[str, ...]:
    """Returns the names that a layer of this config reads from `shared`."""
    names = {FIRST_VALUES: c.value_residual == "later", KEYS_AND_VALUES: c.shared_kv == "reader"}
    return tuple(name for name, given in names.items() if given)


def _require_shared(name: str, kind: str, shared: dict[str, Any] | None) -> dict[str, Any]:
    if shared is None:
        raise ValueError(f"Attention: shared must be the model's dict with {name}={kind!r}")
    return shared


def _published(name: str, source: str, shared: dict[str, Any], key: str) -> Any:
    if key not in shared:
        raise ValueError(
            f"Attention: shared must come from a layer with {name}={source!r}, got {list(shared)}"
        )
    return shared[key]
