"""Memory and speed of decoding against the number of tokens before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from omniattn.compare.budget import Sized
from omniattn.compare.cells import Cell, Result, described
from omniattn.compare.settings import Settings
from omniattn.modules.base.state import parts_of

#: Tokens whose time is measured, and those before them.
_TIMED, _UNTIMED = 32, 4
#: Tokens of one call while the state is filled.
_CHUNK = 512


def cells(models: Sequence[Sized], settings: Settings) -> Iterator[Cell]:
    """Yields a measurement for each model, length and repeat."""
    for model in models:
        for length in settings.decode_lengths:
            for seed in settings.seeds:
                given: Result = {"model": described(model.config), "version": model.version}

                def compute(model: Sized = model, length: int = length, seed: int = seed) -> Result:
                    return _decode(model, length, seed)

                yield Cell("decode", model.name, str(length), seed, given, compute)


@torch.no_grad()
def _decode(model: Sized, length: int, seed: int) -> Result:
    torch.manual_seed(seed)
    decoder: Any = model.config.build().eval()
    try:
        states = decoder.new_state(1, length + _UNTIMED + _TIMED)
    except NotImplementedError:
        return {"bytes": None, "tokens_per_second": None}
    tokens = torch.randint(model.config.vocab_size, (1, length))  # type: ignore[attr-defined]
    for part in tokens.split(_CHUNK, 1):
        decoder(part, state=states)
    token, seconds = tokens[:, :1], []
    for _ in range(_UNTIMED + _TIMED):
        start = time.perf_counter()
        decoder(token, state=states)
        seconds.append(time.perf_counter() - start)
    exact = decoder.new_state(1, length)
    return {
        "bytes": sum(part.nbytes for state in exact for part in parts_of(state)),
        "tokens_per_second": 1 / min(seconds[_UNTIMED:]),  # other processes delay the others
    }
