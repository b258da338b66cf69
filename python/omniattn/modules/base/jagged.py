"""Support of layers for jagged nested tensors (B, j, ..., dim), unpadded sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import is_one_of, require_device, require_tensor, shown
from omniattn.checks.jagged import length_bound, longest, require_ragged, with_boundaries
from omniattn.checks.ranks import ACTIVE
from omniattn.functional.masks import KeyLengths, KeyPadding, Mask


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call: the rows of a batch (B, T, ...), or the parts of a nested tensor.

    A layer computes on (B, T, ...) in either case. A nested tensor becomes (1, total, ...) with its
    sequences concatenated; `attention` and functions with `cu_seqlens` separate them.
    """

    nested: Any = None
    #: Mask of the real tokens of a padded batch, (B, T) bool: True for tokens in `nested`.
    tokens: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Offsets (N + 1,) of the parts of a nested tensor, None for a batch."""
        return None if self.nested is None else self.nested.offsets()

    @property
    def longest(self) -> int:
        """Length of the longest part."""
        return longest(self.nested)

    def attention(self, source: Sequences | None = None) -> Callable[..., Any]:
        """Returns functional.attention with queries of these sequences and keys of `source`."""
        if self.nested is None:
            return functional.attention
        keys = self if source is None else source
        return partial(
            _packed_attention,
            cu_seqlens_q=self.nested.offsets(),
            cu_seqlens_k=keys.nested.offsets(),
            max_seqlen_q=length_bound(self.nested),
            max_seqlen_k=length_bound(keys.nested),
        )

    def entries(self, t: Tensor) -> Tensor:
        """Returns the sequence index (total,) of each token of t (1, total, ...)."""
        offsets = self.nested.offsets()
        tokens = torch.arange(t.shape[1], dtype=offsets.dtype, device=t.device)
        return torch.searchsorted(offsets[1:-1], tokens, right=True)

    def lengths(self, t: Tensor) -> Tensor:
        """Returns the length (1, total) of each token's sequence, for t (1, total, ...)."""
        return self.nested.offsets().diff()[self.entries(t)][None]

    def positions(self, t: Tensor) -> Tensor:
        """Returns the position (T,) of each token of t (B, T, ...) within its sequence."""
        region = ACTIVE.region
        if region is not None and self.nested is None:
            return region.positions(t.shape[1], t.device)
        tokens = torch.arange(t.shape[1], device=t.device)
        if self.nested is None:
            return tokens
        return tokens - self.nested.offsets()[self.entries(t)]

    def each(self, *tensors: Tensor) -> list[tuple[slice, tuple[Tensor, ...]]]:
        """Splits packed tensors (1, total, ...) into sequences (1, T, ...), each with its slice of
        the batch, for functions that do not support packing. Batched tensors are not split."""
        if self.nested is None:
            return [(slice(None), tensors)]
        sizes = self.nested.offsets().diff().tolist()
        parts = zip(*(t.split(sizes, 1) for t in tensors), strict=True)
        found = [(slice(n, n + 1), part) for n, part in enumerate(parts) if sizes[n]]
        return found or [(slice(0, 1), tensors)]

    def apart(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Returns attend(*tensors) of each sequence separately, concatenated to (1, total, ...)."""
        outs = [attend(*part) for _, part in self.each(*tensors)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def sizes(self, t: Tensor) -> Tensor:
        """Returns the length (N,) of each sequence of t (B, T, ...), or (1,) for a batch."""
        if self.nested is not None:
            sizes: Tensor = self.nested.offsets().diff()
            return sizes
        region, count = ACTIVE.region, t.shape[1]
        length = count if region is None else region.length(count)
        return torch.full((1,), length, device=t.device)

    def in_batches(self, function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """Applies the function to t (B, T, ...); pads a packed t (1, total, ...) with zeros to
        (N, longest, ...)."""
        if self.nested is None:
            return function(t)
        entries = self.entries(t)
        at = torch.arange(t.shape[1], device=t.device) - self.nested.offsets()[entries]
        # The length of a padded batch is known without a device synchronisation for its mask.
        steps = self.longest if self.tokens is None else self.tokens.shape[1]
        rows = entries * steps + at
        count = self.nested.shape[0] * steps
        padded = t.new_zeros(count, *t.shape[2:]).index_copy(0, rows, t[0])
        y = function(padded.unflatten(0, (-1, steps)))
        return y.flatten(0, 1).index_select(0, rows)[None]

    def before(self, t: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Shifts t (B, T, ...) by one token and returns the last token (N, ...) of each sequence.

        `first` (N, ...), or zeros, precedes the first tokens.
        """
        region = ACTIVE.region
        if region is not None and first is None and self.nested is None:
            return region.before(t), t[:, -1]
        count = t.shape[0] if self.nested is None else self.nested.shape[0]
        first = t.new_zeros(count, *t.shape[2:]) if first is None else first.to(t.dtype)
        if self.nested is None:
            steps = torch.cat((first[:, None], t), 1)
            return steps[:, :-1], steps[:, -1]
        offsets, entries = self.nested.offsets(), self.entries(t)
        begins = torch.arange(t.shape[1], device=t.device) == offsets[entries]
        steps = torch.nn.functional.pad(t[0], (0, 0, 1, 0))
        earlier = torch.where(begins[:, None], first[entries], steps[:-1])
        return earlier[None], torch.where(offsets.diff()[:, None] > 0, steps[offsets[1:]], first)

    def kept(self, t: Tensor) -> Tensor:
        """Selects the rows (total, ...) of t (T, ...) or (B, T, ...) that belong to real tokens."""
        return t if self.tokens is None else t.expand(*self.tokens.shape, -1)[self.tokens]

    def restored(self, t: Tensor) -> Tensor:
        """Converts t (B, T, ...) back to the form of the call's input: nested, or zero-padded."""
        if self.tokens is not None:
            rows = self.tokens.flatten().nonzero()[:, 0]
            y = t.new_zeros(self.tokens.numel(), *t.shape[2:]).index_copy(0, rows, t[0])
            return y.unflatten(0, self.tokens.shape)
        return t if self.nested is None else with_boundaries(t[0], self.nested)


def sequences_of(
    op: str,
    name: str,
    x: Tensor,
    *,
    state: object = None,
    queries: Sequences | None = None,
    dim: bool = True,
) -> tuple[Tensor, Sequences]:
    """Returns x as (B, T, ...) and its sequences.

    If `queries` are given, x must be nested if and only if they are. A nested x takes no state.
    Without `dim` x is (B, T).
    """
    require_tensor(op, name, x)
    nested = x.is_nested if queries is None else queries.nested is not None
    if not nested:
        return x, Sequences()
    require_ragged(op, name, x, dim=dim)
    if state is not None:
        raise ValueError(
            f"{op}: state must be None where {name} is nested, got state={shown(state)}"
        )
    return x.values()[None], Sequences(x)


def without_padding(x: Tensor, tokens: Tensor) -> tuple[Tensor, Sequences]:
    """Packs the real tokens of x (B, T, dim), True in `tokens` (B, T), into (1, total, dim).

    Returns the packed tokens and their sequences.
    """
    offsets = torch.nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0))
    values = x[tokens]
    nested = torch.nested.nested_tensor_from_jagged(values.detach(), offsets)
    return values[None], Sequences(nested, tokens)


def real_tokens(op: str, mask: Tensor | Mask | None, x: Tensor, past: int) -> Tensor | None:
    """Returns which of the tokens of x (B, T, ...) are no padding, (B, T) bool, or None for all.

    `mask` is that of a recurrence after `past` tokens: boolean (B, 1, 1, past + T), a KeyPadding or
    KeyLengths.
    """
    if mask is None:
        return None
    batch, steps = x.shape[0], 0 if x.is_nested else x.shape[1]
    if isinstance(mask, KeyPadding):
        mask = mask.real[:, None, None]
    elif isinstance(mask, KeyLengths):
        keys = torch.arange(past + steps, device=mask.lengths.device)
        mask = (keys < mask.lengths[..., None])[:, None, None]
    fits = (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and not x.is_nested
        and is_one_of(mask.shape, (batch, 1, 1, past + steps), (1, 1, 1, past + steps))
    )
    if not fits:
        got = "a nested x" if x.is_nested else f"x.shape={tuple(x.shape)}"
        raise ValueError(
            f"{op}: mask must be None or boolean (B, 1, 1, past + T), a KeyPadding or KeyLengths, "
            "which mark padding, because a recurrence reads every token (pass several "
            f"sequences as a jagged nested tensor), got mask={shown(mask)}, {got}, past={past}"
        )
    assert isinstance(mask, Tensor)
    require_device(op, "mask", mask, x)
    return mask[:, 0, 0, past:].expand(batch, steps)


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Computes functional.attention_varlen of q, k, v (1, total, H, D)."""
    sinks = options.get("sinks")
    if sinks is not None and sinks.dim() == 3:  # of each query, (1, H, total)
        options["sinks"] = sinks[0]
    result: Any = functional.attention_varlen(q[0], k[0], v[0], **options)
    return tuple(t[None] for t in result) if isinstance(result, tuple) else result[None]
