"""Packed sequences in the recurrent layers of a model.

Attention gets the boundaries of packed sequences from its mask. Recurrent layers get no mask, and
few models pass `position_ids` on to them. So the forward of a patched model stores the boundaries
for the duration of the call, and the functions in `recurrent.py` and `scans.py` look them up. A
layer that is recomputed in the backward pass, after the call, gets them as a keyword argument of
the checkpointed function.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from omniattn.checks.packed import document_ids
from omniattn.functional import masks
from omniattn.hf.common.interface import asks_for_attention
from omniattn.hf.common.probe import Forward

__all__ = [
    "OTHER_MIXERS",
    "Packing",
    "active",
    "call_layer",
    "is_recomputed",
    "marked_starts",
    "model_forward",
    "packing_of",
    "recomputed_forward",
    "refuse",
]

#: Models that build their masks without `position_ids`.
_MASKS_WITHOUT_POSITIONS = ("GraniteMoeHybridModel",)
#: Layers that mix tokens in their own code, which patching does not replace.
OTHER_MIXERS = ("Qwen4ExpTextPLELayer", "RecurrentGemmaRecurrentBlock", "RwkvFeedForward")
#: Keyword argument that passes the boundaries to a layer.
_KEYWORD = "omniattn_packing"


@dataclass(frozen=True, eq=False)
class Packing:
    """Boundaries of the sequences packed into the rows of a batch.

    Args:
        starts: (B, T) bool, True at the first token of each sequence.
        cu_seqlens: (N + 1,) int64, boundaries in the concatenated rows.
    """

    starts: Tensor
    cu_seqlens: Tensor

    def join(self, x: Tensor) -> Tensor:
        """Concatenates rows: (B, T, ...) -> (1, B T, ...), which `cu_seqlens` refers to."""
        return x.flatten(0, 1)[None]

    def split(self, y: Tensor) -> Tensor:
        """Inverts :meth:`join`: (1, B T, ...) -> (B, T, ...)."""
        return y[0].unflatten(0, self.starts.shape)

    def spread(self, state: Tensor | None) -> Tensor | None:
        """Returns the initial states (N, ...): those given (B, ...) for the first sequence of each
        row, zeros for the others; None for all zeros."""
        if state is None:
            return None
        counts = self.starts.sum(1)
        spread = state.new_zeros(self.cu_seqlens.shape[0] - 1, *state.shape[1:])
        return spread.index_copy(0, counts.cumsum(0) - counts, state)

    def last(self, state: Tensor) -> Tensor:
        """Selects the states (B, ...) of the last sequence in each row from all states (N, ...)."""
        return state[self.starts.sum(1).cumsum(0) - 1]

    def mask(self) -> masks.Documents:
        """Returns the mask of pairs of tokens in the same sequence."""
        return masks.Documents(self.starts.cumsum(1))


class _Active(threading.local):
    """Packing of the model whose layers this thread runs.

    While other parts of a composite model run, such as a vision encoder, it is in `outer`.
    """

    def __init__(self) -> None:
        self.packing: Packing | None = None
        self.outer: Packing | None = None


_active = _Active()


def active() -> Packing | None:
    """Returns the packing of the model whose layers are running."""
    return _active.packing


@contextmanager
def _within(packing: Packing | None, outer: Packing | None = None) -> Iterator[None]:
    before = _active.packing, _active.outer
    _active.packing, _active.outer = packing, outer
    try:
        yield
    finally:
        _active.packing, _active.outer = before


def packing_of(
    x: Tensor, further: Mapping[str, Any] | None = None, steps: int = 1
) -> Packing | None:
    """Returns the packing for a layer's input x with B in dimension 0 and T in dimension `steps`.

    It is the model's; for a layer called alone, it comes from `seq_idx` and `cu_seqlens`.
    """
    batch, length = x.shape[0], x.shape[steps]
    packing = _active.packing or _active.outer
    if packing is None:
        return _packing(marked_starts(further or {}, batch, length, x.device), batch)
    if packing.starts.shape != (batch, length):
        raise ValueError(
            "omniattn.hf: a recurrent layer must get all tokens of its model if sequences are "
            f"packed, got {batch} rows of {length} for {tuple(packing.starts.shape)}"
        )
    return packing


def refuse(packing: Packing | None, name: str, further: Mapping[str, Any] | None = None) -> None:
    """Raises NotImplementedError if transformers' own function would mix packed sequences."""
    told = ("seq_idx", "cu_seqlens")
    if packing is not None and all((further or {}).get(each) is None for each in told):
        raise NotImplementedError(
            f"omniattn.hf: {name} must run on this package's kernels to keep packed sequences apart"
            ", which needs the CPU, SiLU or no activation, and no cache"
        )


def _packing(starts: Tensor | None, batch: int) -> Packing | None:
    """Returns the packing; None if every row is known to be one sequence."""
    if starts is None or (not torch.compiler.is_compiling() and int(starts.sum()) == batch):
        return None
    bounds = starts.flatten().nonzero().flatten()
    return Packing(starts, nn.functional.pad(bounds, (0, 1), value=starts.numel()))


def _starts(numbers: Tensor) -> Tensor:
    """Returns (B, T) bool, True at each row's first token and where `numbers` changes."""
    return nn.functional.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)


def marked_starts(
    given: Mapping[str, Any], batch: int, length: int, device: torch.device
) -> Tensor | None:
    """Returns the starts (B, T) given by `seq_idx` and FlashAttention's boundaries, or None."""
    starts: Tensor | None = None
    seq_idx = given.get("seq_idx")
    if seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(
                f"omniattn.hf: seq_idx must have shape (B, T) = ({batch}, {length}), "
                f"got seq_idx.shape={tuple(seq_idx.shape)}"
            )
        starts = _starts(seq_idx)
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        bounds = given.get(name)
        if bounds is None:
            continue
        if batch != 1:
            raise ValueError(f"omniattn.hf: B must be 1 with {name}, got B={batch}")
        _require_all_tokens(name, bounds, length)
        own = torch.zeros(1, length + 1, dtype=torch.bool, device=device)
        own[0, bounds.to(device, torch.int64)] = True
        starts = own[:, :-1] if starts is None else starts | own[:, :-1]
    return starts


def _require_all_tokens(name: str, bounds: Tensor, length: int) -> None:
    if torch.compiler.is_compiling():
        covered = (bounds[0] == 0) & (bounds[-1] == length) & (bounds.diff() >= 0).all()
        words = f"omniattn.hf: {name} must grow from 0 to the number of tokens"
        torch._assert_async(covered, words)
        return
    grows = bounds.ndim == 1 and len(bounds) > 1 and bool((bounds.diff() >= 0).all())
    if not grows or bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(
            f"omniattn.hf: {name} must grow from 0 to the number of tokens, {length}, "
            f"got {name}={bounds.tolist()}"
        )


@functools.cache
def model_forward(kind: Any) -> Forward:
    """Returns a model's forward that stores the packing of each call for recurrent layers."""
    own = kind.forward
    names = tuple(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        packing = _find(self, given) or _active.outer
        if packing is None:
            return own(self, *args, **kwargs)
        if given.get("use_cache") is None and "use_cache" not in names[: len(args)]:
            kwargs["use_cache"] = False
        inner = any(_notes_packing(each) for each in self.modules() if each is not self)
        with _within(None, packing) if inner else _within(packing):
            return own(self, *args, **kwargs)

    forward.omniattn_notes_packing = True  # type: ignore[attr-defined]
    return forward


def _notes_packing(module: nn.Module) -> bool:
    return getattr(type(module).forward, "omniattn_notes_packing", False)


def _find(model: Any, given: Mapping[str, Any]) -> Packing | None:
    """Returns the packing of a model's call, by the same rules as transformers' masks.

    Restarts of the positions count only without a padding mask.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    batch, length = tokens.shape[:2]
    padding, cache = given.get("attention_mask"), _cache(given)
    padded = isinstance(padding, Tensor) and padding.ndim == 2
    marked = marked_starts(given, batch, length, tokens.device)
    positions = given.get("position_ids")
    counted: Tensor | None = None
    if positions is not None and length > 1 and not padded and (cache is None or padding is None):
        if positions.ndim == 3 and positions.shape[0] != 4:
            _require_one_sequence(model, positions, marked)
        else:  # Qwen3.5: text positions come first
            positions = positions[0] if positions.ndim == 3 else positions
            counted = _starts(document_ids(positions.expand(batch, -1)))
    starts = counted if marked is None else marked if counted is None else counted | marked
    packing = _packing(starts, batch)
    why_not = None if packing is None else _why_not(model, given, packing, counted)
    if why_not is None:
        return packing
    error, text = why_not
    if marked is None and torch.compiler.is_compiling():
        # Positions have no values yet; most calls have one sequence in each row.
        assert starts is not None
        torch._assert_async(starts.sum() == batch, text)
        return None
    raise error(text)


def _require_one_sequence(model: Any, positions: Tensor, marked: Tensor | None) -> None:
    """Raises ValueError if sequences start in positions (3, B, T) of time, height and width only.

    transformers' masks take boundaries from text positions, in a row before these three. Within a
    sequence time does not decrease, and no two tokens have the same position.
    """
    if torch.compiler.is_compiling():
        return
    before, after = positions[..., :-1], positions[..., 1:]
    starts = (after[0] < before[0]) | (after == before).all(0)
    if marked is not None:
        starts = starts & ~marked[:, 1:]
    if starts.any():
        row, token = starts.nonzero()[0].tolist()
        raise ValueError(
            f"omniattn.hf: {type(model).__name__} must get position_ids of shape (4, B, T), text "
            "positions first, to keep packed sequences apart, got "
            f"position_ids.shape={tuple(positions.shape)}, in which row {row} of the batch starts "
            f"a sequence at token {token + 1}"
        )


def _cache(given: Mapping[str, Any]) -> Any:
    names = ("cache", "past_key_values", "cache_params", "state")
    return next((given[name] for name in names if given.get(name) is not None), None)


def _why_not(
    model: Any, given: Mapping[str, Any], packing: Packing, counted: Tensor | None
) -> tuple[type[Exception], str] | None:
    """Returns the error of a packed call in which a layer of the model would mix sequences, and its
    text."""
    kind = type(model).__name__
    if given.get("use_cache") or _cache(given) is not None:
        return ValueError, (
            f"omniattn.hf: {kind} must be called with use_cache=False and without a cache if "
            "sequences are packed, as a cache has one state per row"
        )
    layers = list(model.modules())
    other = next((m for m in layers if type(m).__name__ in OTHER_MIXERS), None)
    if other is not None:
        return NotImplementedError, (
            f"omniattn.hf: {kind} takes no packed sequences, as {type(other).__name__} mixes "
            "tokens in its own code; pass each sequence as a separate row"
        )
    # This package's attention calls `active`; others depend on the mask alone.
    without = any(type(m).__name__ in _MASKS_WITHOUT_POSITIONS for m in layers)
    told = None if without else counted
    if told is not None and (torch.compiler.is_compiling() or torch.equal(told, packing.starts)):
        return None
    for layer in filter(asks_for_attention, layers):
        how = getattr(getattr(layer, "config", None), "_attn_implementation", None)
        if how != "omniattn":
            return NotImplementedError, (
                f"omniattn.hf: {type(layer).__name__} gets a mask that does not keep these packed "
                'sequences apart; use attn_implementation="omniattn", or patch with attention=True'
            )
    return None


#: Layers that have run packed sequences with gradients.
_ran_packed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def call_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `__call__` of a layer that may be recomputed: passes the packing to its forward."""
    if _active.packing is not None:
        kwargs[_KEYWORD] = _active.packing
    return nn.Module.__call__(self, *args, **kwargs)


@functools.cache
def recomputed_forward(kind: Any) -> Forward:
    """Returns a layer's forward that runs with the packing passed by `call_layer`."""
    own = kind.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        packing = kwargs.pop(_KEYWORD, None)
        if not torch.compiler.is_compiling():
            _check_recomputed(self, packing)
        with _within(packing):
            return own(self, *args, **kwargs)

    return forward


def is_recomputed(kind: Any, forward: Forward) -> bool:
    """Returns True if `recomputed_forward` made the forward of a class."""
    return issubclass(kind, GradientCheckpointingLayer) and recomputed_forward(kind) is forward


def _check_recomputed(layer: nn.Module, packing: Packing | None) -> None:
    """Raises RuntimeError if a checkpoint recomputes `layer` without the boundaries of the packed
    sequences."""
    if packing is not None:
        if torch.is_grad_enabled():
            _ran_packed.add(layer)
    elif layer in _ran_packed and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"omniattn.hf: {type(layer).__name__} must be recomputed by transformers' own "
            "checkpoints where sequences are packed: call model.gradient_checkpointing_enable() "
            "in place of a wrapper around its layers"
        )
