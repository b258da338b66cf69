"""Memory of caches and states, and of score matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from omniattn.calculate.costs import new_states
from omniattn.calculate.sources import Source, config_of, dtype_of, require_sizes
from omniattn.calculate.trace import forward_calls, meta_model
from omniattn.models import Model
from omniattn.modules import Attention


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of caches and states after some tokens.

    Args:
        total: bytes of all layers and sequences.
        layers: bytes by layer.
        per_token: bytes that one more token of one sequence adds.
    """

    total: int
    layers: tuple[int, ...]
    per_token: int


def cache_bytes(
    config: Source,
    tokens: int,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = "bf16",
    source_tokens: int | None = None,
) -> CacheBytes:
    """Returns the bytes that the layers keep of past tokens, by layer.

    Attention keeps ``2 Hkv D`` numbers per token, latent attention ``r_kv + d_r``, a window of W
    keys at most W tokens, and a recurrence a state of one size, in fp32. The storage is that of
    `new_state`, on the meta device.

    Args:
        config: a decoder: a config, the name of a preset, or the path of a config.json.
        tokens: tokens in the cache.
        batch: number of sequences.
        dtype: dtype of the model, such as "bf16".
        source_tokens: tokens that cross-attention keeps, default `tokens`.

    Example:
        >>> cache_bytes("llama-3-8b", 1).total
        131072
    """
    require_sizes("cache_bytes", tokens=tokens, batch=batch)
    found, storage = config_of(config), dtype_of(dtype)
    model = meta_model(found, storage)
    source = tokens if source_tokens is None else source_tokens
    require_sizes("cache_bytes", source_tokens=source)
    layers = tuple(_layer_bytes(model, tokens, batch, source))
    more = sum(_layer_bytes(model, tokens + 1, 1, source))
    return CacheBytes(sum(layers), layers, more - sum(_layer_bytes(model, tokens, 1, source)))


def kv_bytes(
    config: Source, tokens: int, *, batch: int = 1, dtype: torch.dtype | str = "bf16"
) -> int:
    """Returns the bytes of all caches and states; see :func:`cache_bytes`.

    Example:
        >>> kv_bytes("gpt2-small", 1024)
        37748736
    """
    return cache_bytes(config, tokens, batch=batch, dtype=dtype).total


def _layer_bytes(model: Model, tokens: int, batch: int, source: int) -> Iterator[int]:
    """Yields the bytes of each layer; windows keep no more tokens than they see."""
    states = new_states("cache_bytes", model, batch, tokens)
    blocks = _blocks(model, len(states))
    for state, block in zip(states, blocks, strict=True):
        parts = state if isinstance(state, tuple) else (state,)
        total = sum(part.nbytes for part in parts)
        mixer, cross = getattr(block, "mixer", None), getattr(block, "cross_attn", None)
        if (
            isinstance(mixer, Attention)
            and mixer.config.causal
            and mixer.config.window_size[0] >= 0
        ):
            rolling = mixer.new_state(batch, tokens, rolling=True)
            total += rolling.nbytes - mixer.new_state(batch, tokens).nbytes
        if isinstance(cross, Attention):  # stores its source at the first call
            c = cross.config
            numbers = 2 * batch * source * c.kv_heads * c.head_size
            total += numbers * cross.k_proj.weight.element_size()
        yield total


def _blocks(model: nn.Module, count: int) -> list[nn.Module]:
    """Returns the blocks to which the states of a model belong."""
    stack = getattr(model, "decoder", model)
    blocks = list(getattr(stack, "layers", ()))
    if len(blocks) != count:
        raise NotImplementedError(
            f"cache_bytes: the states of a model must be those of its layers, got {count} states "
            f"of {len(blocks)} layers of {type(model).__name__}"
        )
    return blocks


@dataclass(frozen=True)
class ScoreBytes:
    """Bytes of score matrices that are stored, as eager attention does.

    Args:
        total: bytes of all layers, as a backward needs them.
        largest: bytes of the largest matrix, the least that a forward needs.
    """

    total: int
    largest: int


def score_bytes(
    config: Source,
    tokens: int,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = "fp32",
    source_tokens: int | None = None,
) -> ScoreBytes:
    """Returns the memory of score matrices, ``B Hq Tq Tk`` numbers for each attention.

    The kernels of this package never store them.

    Args:
        config, tokens, batch, source_tokens: as in :func:`omniattn.calculate.flops`.
        dtype: dtype of the scores.

    Example:
        >>> score_bytes("gpt2-small", 1024).largest / 2**20
        48.0
    """
    require_sizes("score_bytes", tokens=tokens, batch=batch)
    size = dtype_of(dtype).itemsize
    calls = forward_calls(config_of(config), tokens, batch, source_tokens)
    matrices = [size * call.cost.scores for call in calls]
    return ScoreBytes(sum(matrices), max(matrices, default=0))
