"""Replaces the scans of transformers' state-space models by this package's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.functional.recurrences._steps import (
    compute_dtype,
    in_place,
    selective_scan_inplace,
    ssd_inplace,
)
from omniattn.functional.state_space.ssd import Sequences, state_space_duality
from omniattn.hf.common.packed import packing_of, refuse
from omniattn.hf.common.probe import Forward, draws, own_copy, takes

__all__ = ["SCANS", "same_scan"]


def _channels(original: Forward) -> Forward:
    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Maps hidden_states, dt and z (B, D, T), B and C (B, N, T) to y (B, D, T).

        The last two options choose among transformers' implementations and have no effect.
        """
        options: dict[str, Any] = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        packing = packing_of(hidden_states, kwargs, steps=2)
        if not takes(hidden_states):
            refuse(packing, original.__name__, kwargs)
            how = {"use_mambapy": use_mambapy, "use_associative_scan": use_associative_scan}
            how["return_last_state"] = return_last_state
            return original(hidden_states, dt, A, B, C, D, z, **options, **how, **kwargs)
        x = hidden_states.mT
        dt, B, C = (t.to(x.dtype).mT for t in (dt, B, C))
        gate = None if z is None else z.to(x.dtype).mT
        if packing is not None:
            x, dt, B, C = map(packing.join, (x, dt, B, C))
            gate = None if gate is None else packing.join(gate)
            options["cu_seqlens"] = packing.cu_seqlens
        y, state = functional.selective_scan(x, dt, A, B, C, D, gate, **options)
        if packing is not None:
            y, state = packing.split(y), packing.last(state)
        return (y.mT, state) if return_last_state else y.mT

    return mamba_selective_scan


def _channel_step(original: Forward) -> Forward:
    def mamba_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Takes hidden_states, dt, z (B, D), B and C (B, N); updates state (B, D, N)."""
        if not takes(hidden_states):
            options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            theirs: Tensor = original(state, hidden_states, dt, A, B, C, **options, **kwargs)
            return theirs
        x = hidden_states[:, None]
        steps, keys, queries = (t.to(x.dtype)[:, None] for t in (dt, B, C))
        gate = None if z is None else z.to(x.dtype)[:, None]
        D, dt_bias = _widened(state, D, dt_bias)
        if _in_place(x, state, A, D, dt_bias):
            own = A, keys[:, :, None], queries[:, :, None], D, gate, dt_bias
            stepped: Tensor = selective_scan_inplace(x, steps, *own, state, dt_softplus)
            return stepped[:, 0]
        rest: dict[str, Any] = {"delta_softplus": dt_softplus, "initial_state": own_copy(state)}
        y, after = functional.selective_scan(x, steps, A, keys, queries, D, gate, dt_bias, **rest)
        state.copy_(after)
        return y[:, 0]

    return mamba_selective_state_update


def _chunks(original: Forward) -> Forward:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls `functional.ssd` and returns y in fp32; chunk_size has no effect."""
        packing = packing_of(hidden_states, kwargs)
        if not takes(hidden_states):
            refuse(packing, original.__name__, kwargs)
            options: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states}
            options |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
            options["return_final_states"] = return_final_states
            return original(hidden_states, dt, A, B, C, chunk_size, **options, **kwargs)
        rows = hidden_states, B, C
        if len({t.dtype for t in rows}) > 1:
            rows = hidden_states.float(), B.float(), C.float()
        x, B, C = rows
        initial = None if initial_states is None else own_copy(initial_states)
        steps, bounds = (dt_bias, dt_softplus, dt_limit), None
        if packing is not None:
            x, dt, B, C = map(packing.join, (x, dt, B, C))
            initial, bounds = packing.spread(initial), packing.cu_seqlens
        rest = (D, None, *steps, Sequences(initial, bounds))
        y, state = state_space_duality(x, dt, A, B, C, *rest, fp32_output=True)
        if packing is not None:
            y, state = packing.split(y), packing.last(state)
        return (y, state.contiguous()) if return_final_states else y  # steps update it in place

    return mamba2_chunk_scan


def _head_step(original: Forward) -> Forward:
    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Takes hidden_states, dt (B, H, P), A (H, P, N), D, dt_bias (H, P), B and C (B, G, N).

        Updates state (B, H, P, N). dt, dt_bias and A are scalars per head, expanded.
        """
        given = [(dt, (2,)), (A, (1, 2))] + ([] if dt_bias is None else [(dt_bias, (1,))])
        ours = takes(hidden_states) and all(_expanded(*each) for each in given)
        if not (ours and dt_softplus):  # without it transformers allows negative steps
            options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            theirs: Tensor = original(state, hidden_states, dt, A, B, C, **options, **kwargs)
            return theirs
        x, steps, decay = hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0]
        keys, queries = B[:, None].to(x.dtype), C[:, None].to(x.dtype)
        gate = None if z is None else z[:, None].to(x.dtype)
        D, bias = _widened(state, D, None if dt_bias is None else dt_bias[:, 0])
        if steps.dtype == x.dtype and _in_place(x, state, decay, D, bias):
            own = D, gate, bias, state, dt_softplus, -math.inf, math.inf
            stepped: Tensor = ssd_inplace(x, steps, decay, keys, queries, *own)
            return stepped[:, 0]
        rest: dict[str, Any] = {"D": D, "z": gate, "dt_bias": bias, "dt_softplus": dt_softplus}
        y, after = functional.ssd(
            x, steps, decay, keys, queries, **rest, initial_state=own_copy(state)
        )
        state.copy_(after)
        return y[:, 0]

    return mamba2_selective_state_update


def _widened(state: Tensor, *vectors: Tensor | None) -> list[Tensor | None]:
    """Casts tensors to the state's dtype, which may be wider than the parameters'."""
    return [None if t is None else t.to(state.dtype) for t in vectors]


def _in_place(x: Tensor, state: Tensor, *vectors: Tensor | None) -> bool:
    """Returns True if the ops can update `state` in place and `vectors` have its dtype."""
    given = [t for t in vectors if t is not None]
    wide = state.dtype == compute_dtype(x) and all(t.dtype == state.dtype for t in given)
    return wide and state.is_contiguous() and in_place(x, state, *given)


def _expanded(t: Tensor, dims: tuple[int, ...]) -> bool:
    return all(t.stride(d) == 0 or t.shape[d] == 1 for d in dims)


#: Name of transformers' function -> maker of ours.
SCANS: dict[str, Callable[[Forward], Forward]] = {
    "mamba_selective_scan": _channels,
    "mamba_selective_state_update": _channel_step,
    "mamba2_chunk_scan": _chunks,
    "mamba2_selective_state_update": _head_step,
}


def same_scan(name: str, original: Forward, ours: Forward) -> list[tuple[Tensor, ...]]:
    """Returns the results of both functions on a probe."""
    return [tuple(_PROBES[name](function)) for function in (original, ours)]


def _probe_channels(function: Forward) -> tuple[Tensor, ...]:
    draw = draws()
    y, state = function(
        draw(1, 6, 19),
        draw(1, 6, 19),
        -draw(6, 4).exp(),
        draw(1, 4, 19),
        draw(1, 4, 19),
        draw(6),
        z=draw(1, 6, 19),
        delta_bias=draw(6),
        delta_softplus=True,
        return_last_state=True,
    )
    return y, state


def _probe_channel_step(function: Forward) -> tuple[Tensor, ...]:
    draw = draws()
    state = draw(2, 6, 4)
    rows, A = [draw(2, 6) for _ in range(3)], -draw(6, 4).exp()
    options = {"z": rows[2], "dt_bias": draw(6), "dt_softplus": True}
    y = function(state, rows[0], rows[1], A, draw(2, 4), draw(2, 4), draw(6), **options)
    return y, state


def _probe_chunks(function: Forward) -> tuple[Tensor, ...]:
    draw = draws()
    y, state = function(
        draw(1, 19, 4, 3),
        draw(1, 19, 4),
        -draw(4).exp(),
        draw(1, 19, 2, 5),
        draw(1, 19, 2, 5),
        8,
        D=draw(4),
        dt_bias=draw(4),
        initial_states=draw(1, 4, 3, 5),
        dt_softplus=True,
        dt_limit=(0.1, 2.0),
        return_final_states=True,
    )
    return y, state


def _probe_head_step(function: Forward) -> tuple[Tensor, ...]:
    draw = draws()
    state = draw(2, 4, 3, 5)
    y = function(
        state,
        draw(2, 4, 3),
        draw(2, 4, 1).expand(-1, -1, 3),
        (-draw(4, 1, 1).exp()).expand(-1, 3, 5),
        draw(2, 2, 5),
        draw(2, 2, 5),
        draw(4, 1).expand(-1, 3),
        dt_bias=draw(4, 1).expand(-1, 3),
        dt_softplus=True,
        z=None,
    )
    return y, state


_PROBES: dict[str, Callable[[Forward], tuple[Tensor, ...]]] = {
    "mamba_selective_scan": _probe_channels,
    "mamba_selective_state_update": _probe_channel_step,
    "mamba2_chunk_scan": _probe_chunks,
    "mamba2_selective_state_update": _probe_head_step,
}
