"""Canon layers: short causal convolutions with a residual, at up to four places of a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.checks.arguments import is_traced, shown
from omniattn.functional.masks import Mask
from omniattn.functional.recurrences._steps import in_place
from omniattn.modules.base.jagged import real_tokens, sequences_of, without_padding
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, State, States, Storage
from omniattn.modules.caches.cache import storage_like

PLACES = "ABCD"


def require_places(op: str, canon: str) -> None:
    """Requires that `canon` has letters of "ABCD" in their order."""
    if canon != "".join(place for place in PLACES if place in canon):
        raise ValueError(f"{op}: canon must have letters of ABCD in order, got canon={canon!r}")


class Canon(nn.Module):
    """Convolutions t + conv(t) of a block: A of the mixer's input, B of queries, keys and values, C
    of the channel mixer's input, D of its hidden channels before the activation.

    Args:
        widths: number of channels by place.
        taps: number of taps of each filter.
        device, dtype: device and dtype of the parameters.

    Reference:
        Allen-Zhu, Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon
        Layers, 2025, SSRN 5240330. Verified against huggingface/modeling_llama_canon.py of
        facebookresearch/PhysicsLM4 at commit 7580696.
    """

    def __init__(
        self,
        widths: dict[str, int],
        taps: int,
        backend: str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for place, width in widths.items():
            config = ShortConvolution.Config(width, taps, False, None, backend, residual=True)
            self.add_module(place, ShortConvolution(config, device=device, dtype=dtype))

    def new_state(self, batch: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates the last inputs, zeros, of all filters."""
        tensors = {}
        for place, layer in self.named_children():
            assert isinstance(layer, ShortConvolution)
            like = storage_like(layer.weight, **storage)
            tensors[place] = layer.new_state(batch, layer.weight.new_zeros(0, **like))
        state = RecurrentState(**tensors)
        state.kind = "Canon"
        return state

    def over(
        self, op: str, x: Tensor, state: State | None, mask: Tensor | Mask | None
    ) -> CanonCall:
        """Returns the convolutions of a call whose input is x (B, T, dim), nested or padded."""
        return CanonCall(self, op, x, state, mask)


class CanonCall:
    """The convolutions of one call of a block."""

    def __init__(
        self, canon: Canon, op: str, x: Tensor, state: State | None, mask: Tensor | Mask | None
    ) -> None:
        self.canon, self.steps = canon, 0
        self.state: RecurrentState | None = None
        tokens, self.sequences = sequences_of(op, "x", x, state=state)
        if state is not None:
            if not isinstance(state, States) or not isinstance(state.get("canon"), RecurrentState):
                raise TypeError(f"{op}: state must be that of this block, got state={shown(state)}")
            found = state.get("canon")
            assert isinstance(found, RecurrentState)
            shapes = canon.new_state(1, device="meta").shapes
            found.require_like(op, shapes, tokens, "Canon")
            self.state, self.steps = found, tokens.shape[1]
        past = 0 if self.state is None else self.state.length
        real = real_tokens(op, mask, x, past)
        if real is not None and real.is_cpu and not is_traced() and bool(real.all()):
            real = None
        self.real = real
        self.after: dict[str, Tensor] = {}

    def at(self, place: str) -> Callable[[Tensor], Tensor]:
        """Returns the convolution of a place, of tensors that are not nested."""
        return partial(self._convolved, place)

    def input(self, place: str, x: Tensor) -> Tensor:
        """Returns a layer's input x (B, T, dim), nested or not, after its convolution if any."""
        if not hasattr(self.canon, place):
            return x
        return self.sequences.restored(
            self._convolved(place, x.values()[None] if x.is_nested else x)
        )

    def finish(self) -> None:
        """Stores the last inputs in the state."""
        if self.state is not None:
            self.state.advance(self.steps, **self.after)

    def _convolved(self, place: str, t: Tensor) -> Tensor:
        layer = self.canon.get_submodule(place)
        assert isinstance(layer, ShortConvolution)
        sequences, before, taps = self.sequences, None, None
        if self.state is not None:
            before = self.state[place]
            taps = self._step_taps(place, layer, t, before)
            before = before if taps is not None else before.to(t.dtype)
        if self.real is not None:
            t, sequences = without_padding(t, self.real)
        y, self.after[place] = layer(t, before, sequences.cu_seqlens, taps)
        return y if self.real is None else sequences.restored(y)

    def _step_taps(
        self, place: str, layer: ShortConvolution, t: Tensor, before: Tensor
    ) -> Tensor | None:
        """Returns the taps for a single token whose state can be updated in place, else None."""
        assert self.state is not None
        alone = t.shape[1] == 1 and self.real is None and layer.config.backend is None
        same = before.dtype == t.dtype == layer.weight.dtype
        if not (alone and same and in_place(t, before, layer.weight)):
            return None
        return self.state.derived(place, layer.weight, layer.step_taps)
