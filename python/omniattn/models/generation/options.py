"""Options of `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_bool,
    require_int,
    require_integers,
    require_number,
    require_rows,
    shown,
)
from omniattn.encoding.records import packed
from omniattn.functional.masks.base import require_bool_mask
from omniattn.models.generation.protocol import Generator
from omniattn.modules.caches.eviction import Eviction


class GenerationOptions(TypedDict, total=False):
    """Options of `generate` and `stream`; `generate` documents them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    eos: int | Sequence[int] | None
    stop: Sequence[Sequence[int]]
    num_draft_tokens: int
    seed: int
    source: Tensor | None
    eviction: Eviction | Sequence[Eviction] | None
    source_mask: Tensor | None
    kv_dtype: torch.dtype | None


class Generation(NamedTuple):
    """Packed options."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos: int | Sequence[int] | None = None
    stop: Sequence[Sequence[int]] = ()
    num_draft_tokens: int = 0
    seed: int = 0
    source: Tensor | None = None
    eviction: Eviction | Sequence[Eviction] | None = None
    source_mask: Tensor | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        if self.eos is None:
            return ()
        return tuple(self.eos) if isinstance(self.eos, Sequence) else (self.eos,)


class Beams(NamedTuple):
    """Options of beam search."""

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False


def checked(
    op: str, model: Generator, tokens: Tensor, max_new_tokens: int, options: Mapping[str, Any]
) -> Generation:
    """Packs the options of a call of `op` and checks them with its other arguments."""
    rules = packed(op, Generation, options)
    vocab = model.config.vocab_size
    require_integers(op, "tokens", tokens)
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{op}: tokens must have shape (B, T) with T > 0, got tokens={tuple(tokens.shape)}"
        )
    require_int(op, "max_new_tokens", max_new_tokens, 0)
    require_number(op, "temperature", rules.temperature, 0)
    require_int(op, "top_k", rules.top_k, 0)
    require_number(op, "top_p", rules.top_p, most=1, above=0)
    require_number(op, "min_p", rules.min_p, 0, most=1)
    require_number(op, "repetition_penalty", rules.repetition_penalty, above=0)
    require_int(op, "num_draft_tokens", rules.num_draft_tokens, 0)
    require_int(op, "seed", rules.seed)
    for end in rules.ends:
        require_int(op, "eos", end, 0, vocab - 1)
    _require_stops(op, rules.stop, vocab)
    require_rows(op, "tokens", tokens.cpu(), vocab)
    _require_source_mask(op, rules)
    return rules


def _require_source_mask(op: str, rules: Generation) -> None:
    mask, source = rules.source_mask, rules.source
    if mask is None:
        return
    if source is None:
        raise ValueError(f"{op}: source_mask needs a source, got source=None")
    require_bool_mask(op, "source_mask", mask)
    if mask.shape != source.shape[:2]:
        raise ValueError(
            f"{op}: source_mask must have shape (B, S) of source, "
            f"got source_mask.shape={tuple(mask.shape)}, source.shape={tuple(source.shape)}"
        )


def _require_stops(op: str, stop: Any, vocab: int) -> None:
    is_list = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not is_list or not all(isinstance(s, Sequence) and len(s) > 0 for s in stop):
        raise TypeError(
            f"{op}: stop must be a sequence of sequences of token ids, got stop={shown(stop)}"
        )
    for sequence in stop:
        for token in sequence:
            require_int(op, "stop", token, 0, vocab - 1)


def check_beams(op: str, beams: Beams, rules: Generation, vocab: int) -> None:
    """Checks the options of beam search, which does not draw and does not draft."""
    require_int(op, "num_beams", beams.num_beams, 1, vocab)
    require_number(op, "length_penalty", beams.length_penalty)
    require_bool(op, "early_stopping", beams.early_stopping)
    if beams.num_beams > 1:
        for name in ("temperature", "num_draft_tokens"):
            if getattr(rules, name) != 0:
                raise ValueError(
                    f"{op}: {name} must be 0 with num_beams={beams.num_beams}, "
                    f"got {name}={getattr(rules, name)}"
                )
    elif beams != Beams():
        raise ValueError(
            f"{op}: length_penalty and early_stopping need num_beams > 1, got num_beams=1, "
            f"length_penalty={beams.length_penalty}, early_stopping={beams.early_stopping}"
        )
