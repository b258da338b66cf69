"""Engram in a block: states, padding and nested sequences."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import is_traced, shown
from omniattn.functional.masks import Mask
from omniattn.modules.base.engram import Engram
from omniattn.modules.base.jagged import real_tokens, sequences_of, without_padding
from omniattn.modules.base.state import RecurrentState, State, States, Storage
from omniattn.modules.caches.cache import storage_like


class EngramState(RecurrentState):
    """The last N - 1 tokens, and the last inputs of the convolution."""

    kind = "Engram"
    integers: ClassVar[tuple[str, ...]] = ("tokens",)


def new_state(layer: Engram, batch: int, **storage: Unpack[Storage]) -> EngramState:
    """Creates the state before the first token."""
    c, like = layer.config, storage_like(layer.conv_weight, **storage)
    taps, width = (c.kernel_size - 1) * c.longest, c.num_streams * c.dim
    return EngramState(
        tokens=layer.multipliers.new_full((batch, c.longest - 1), c.pad, device=like["device"]),
        conv=layer.conv_weight.new_zeros(batch, taps, width, **like).mT,
    )


def memory(
    op: str,
    layer: Engram,
    x: Tensor,
    shared: dict[str, Any] | None,
    state: State | None,
    mask: Tensor | Mask | None,
) -> Tensor:
    """Returns what the layer adds to x (B, T, dim), nested or padded.

    `shared` has the model's tokens (B, T), or packed (1, total); `state` is that of the block.
    """
    if shared is None or "tokens" not in shared:
        raise ValueError(f"{op}: shared must have the tokens with engram, got {shown(shared)}")
    hidden, sequences = sequences_of(op, "x", x, state=state)
    tokens, found = shared["tokens"].long(), None
    if state is not None:
        own = state.get("engram") if isinstance(state, States) else None
        if not isinstance(own, EngramState):
            raise TypeError(f"{op}: state must be that of this block, got state={shown(state)}")
        found = own
        found.require_like(op, new_state(layer, 1, device="meta").shapes, hidden, "Engram")
    real = real_tokens(op, mask, x, 0 if found is None else found.length)
    if real is not None and (not real.is_cpu or is_traced() or not real.all()):
        hidden, sequences = without_padding(hidden, real)
        tokens = tokens[real][None]
    before = None if found is None else (found["tokens"], found["conv"])
    y, (last, conv) = layer(hidden, tokens, before, sequences.cu_seqlens)
    if found is not None:
        found.advance(shared["tokens"].shape[1], tokens=last, conv=conv)
    return sequences.restored(y)
