"""Tangents of recurrences, as sums of recurrences.

With c_t = g_1 + .. + g_t, o_t = sum over s <= t of (q_t . e^(c_t - c_s) k_s) v_s + e^(c_t) terms of
the initial state. The output is linear in q, in k together with the initial state, and in v; and a
tangent of g multiplies the term of t and s by c'_t - c'_s, with the tangents c' of c. So

    o' = o(q' + c' q, k, v, S) + o(q, k' - c' k, v, S') + o(q, k, v', 0),

and derivatives of every order are made of calls of the kernels. With written values that the state
determines, S_t = diag(e^(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T, the tangents of a and b
write b_t (S_{t-1}^T (a'_t + c'_{t-1} a_t))^T + (b'_t - c'_t b_t) (S_{t-1}^T a_t)^T, too. The delta
rule is the case a_t = e^(g_t) k_t, b_t = -beta_t k_t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omniattn.ops.dispatch import chunks
from omniattn.ops.dispatch.pieces import Composed, Piece, Pieces, Tensors
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.recurrence import FEATURE_MAPS, divisor

__all__ = ["SEGMENT", "TOKENS", "applies", "tangent_pieces", "tokens"]

Values = dict[str, Any]
#: The op, as a function of its arguments by name.
Call = Callable[[Values], tuple[Tensor, Tensor]]
#: Number of tokens of the calls whose graph a derivative holds; longer ones are divided.
TOKENS = 2048
#: Number of tokens after which sums of the tangents of decays start anew.
SEGMENT = 128
_READ = ("q", "k", "v", "a", "b", "bonus", "cu_seqlens")
#: Arguments (B, T, ..) of a bare recurrence, one with only these, a bonus and states.
_OVER_TIME = ("q", "k", "v", "g", "a", "b", "gv")


def applies(values: Values) -> bool:
    """Returns whether a call has tangents of this form: it has at most one of these arguments."""
    kinds = (values["delta"], *(values[n] is not None for n in ("a", "gv", "bonus")))
    return sum(kinds) <= 1


def tokens(values: Values) -> int:
    """Returns the number of tokens of a chunk (dispatch/chunks.py) of a call."""
    return TOKENS if applies(values) else chunks.TOKENS


def tangent_pieces(call: Call, values: Values, inputs: Sequence[str]) -> Pieces:
    """Returns the pieces of a call whose arguments are `values`, functions of its `inputs`."""
    dtype = compute_dtype(values["q"])
    v, cu_seqlens = values["v"], values["cu_seqlens"]
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (count, v.shape[2], values["q"].shape[3], v.shape[3] + values["normalize"])
    outputs = (
        (v.shape, dtype if values["fp32_output"] else v.dtype),
        (torch.Size(state), dtype),
    )
    others = {name: value for name, value in values.items() if name not in inputs}

    def of(tensors: Tensors) -> Values:
        return others | dict(zip(inputs, tensors, strict=True))

    def whole(function: Call) -> Piece:
        return Piece(lambda *t: function(of(t)), ((),) * len(inputs), ((),) * len(outputs))

    if not _is_bare(values):
        return Pieces((whole(partial(_around_bare, call)),), outputs)

    def tangents(tensors: Tensors, along: Tensors) -> tuple[Tensor, Tensor]:
        return _tangents(call, of(tensors), of(along))

    return Composed((whole(call),), outputs, tangents=tangents)


def _is_bare(values: Values) -> bool:
    absent = ("beta", "skip", "min_denominator")
    identity = values["feature_map"] == "identity" and not values["normalize"]
    return identity and not values["delta"] and all(values[n] is None for n in absent)


def _around_bare(call: Call, values: Values) -> tuple[Tensor, Tensor]:
    """Computes a recurrence by a bare one between operations of torch."""
    to_features = FEATURE_MAPS[values["feature_map"]]
    v, beta, skip, least = (values[n] for n in ("v", "beta", "skip", "min_denominator"))
    if values["normalize"]:
        v = torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1)
    q, k = (to_features(values[n]) for n in ("q", "k"))
    bare: Values = {"beta": None, "skip": None, "min_denominator": None, "scale": 1.0}
    if values["delta"]:
        q, k = (_of_each_head(t, v.shape[2]) for t in (q, k))
        g = torch.zeros_like(k) if values["g"] is None else _rows(values["g"]).expand_as(k)
        removed = -k if beta is None else -beta[..., None] * k
        bare |= {"delta": False, "g": g, "a": g.exp() * k, "b": removed}
    bare |= {"q": q, "k": k, "v": v if beta is None else beta[..., None] * v}
    o, state = call(values | bare | {"feature_map": "identity", "normalize": False, "eps": 0.0})
    if skip is not None:
        o = o + _of_tokens(skip, values["cu_seqlens"], v) * v
    if values["normalize"]:
        o, sums = o[..., :-1], o[..., -1:]
        o = o / divisor(sums, None if least is None else least[..., None], values["eps"])
    return values["scale"] * o, state


def _tangents(call: Call, at: Values, along: Values) -> tuple[Tensor, Tensor]:
    """Computes the tangents of a bare recurrence from its arguments and their tangents.

    Differences of sums of the tangents of decays lose digits in long sums: sums start anew after
    SEGMENT tokens, and packed sequences are computed in float64.
    """
    length = at["v"].shape[1]
    if (along["g"] is None and along["gv"] is None) or length <= SEGMENT:
        return _of_segment(call, at, along)[:2]
    if at["cu_seqlens"] is not None:
        wide = ({n: _double(t) for n, t in side.items()} for side in (at, along))
        o, moved, _ = _of_segment(call, *wide)
        return o.to(at["v"].dtype), moved.to(at["v"].dtype)
    outputs = []
    state, moved = at["initial_state"], along["initial_state"]
    for here, there in zip(_segments(at), _segments(along), strict=True):
        given, tangents = here | {"initial_state": state}, there | {"initial_state": moved}
        o, moved, state = _of_segment(call, given, tangents)
        outputs.append(o)
    return torch.cat(outputs, 1), moved


def _segments(values: Values) -> Iterator[Values]:
    parts = {n: values[n].split(SEGMENT, 1) for n in _OVER_TIME if values[n] is not None}
    for part in zip(*parts.values(), strict=True):
        yield values | dict(zip(parts, part, strict=True))


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t


def _of_segment(call: Call, at: Values, along: Values) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the tangents of the outputs and of the final state, and with tangents of decays that
    state."""
    q, k, v, a, b, bonus, cu_seqlens = (at[n] for n in _READ)
    later, earlier, written, moved_a, moved_b = (along[n] for n in ("q", "k", "v", "a", "b"))
    decay, of_values = _Summed(along["g"], cu_seqlens), _Summed(along["gv"], cu_seqlens)
    if decay or bonus is not None:
        rows = (q, k, a, b, later, earlier, moved_a, moved_b)
        q, k, a, b, later, earlier, moved_a, moved_b = (
            None if t is None else _of_each_head(t, v.shape[2]) for t in rows
        )
    if decay:
        later = _plus(later, decay.of_tokens(before=bonus is not None) * q)
        earlier = _plus(earlier, -decay.of_tokens() * k)
        if a is not None:
            moved_a = _plus(moved_a, decay.of_tokens(before=True) * a)
            moved_b = _plus(moved_b, -decay.of_tokens() * b)
    if of_values:
        written = _plus(written, -of_values.of_tokens() * v)
    at = at | {"q": q, "k": k, "a": a, "b": b}

    o = final = last = None
    if later is not None:
        o, last = call(at | {"q": later})
        final = decay.of_sequences() * last if decay else None
    start = along["initial_state"]
    if earlier is None and start is not None:
        earlier = torch.zeros_like(k)
    writes = [(earlier, v, start), (k, written, None)]
    if moved_a is not None:
        writes.append((b, _read_before(call, at, moved_a), None))
    if moved_b is not None:
        writes.append((moved_b, _read_before(call, at, a), None))
    for row, value, state in writes:
        if row is not None and value is not None:
            found, added = call(at | {"k": row, "v": value, "initial_state": state})
            o, final = _plus(o, found), _plus(final, added)
    if of_values:
        found, last = call(at)
        o = _plus(o, of_values.of_tokens() * found)
        final = _plus(final, of_values.of_sequences().mT * last)
    if bonus is not None and (decay or along["bonus"] is not None):
        weight = _of_tokens(bonus, cu_seqlens, v) * _rows(along["g"]) if decay else None
        if along["bonus"] is not None:
            weight = _plus(weight, _of_tokens(along["bonus"], cu_seqlens, v))
        o = _plus(o, at["scale"] * (weight * q * k).sum(-1, keepdim=True) * v)
    if final is None:
        count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = v.new_zeros(count, v.shape[2], k.shape[3], v.shape[3])
    return torch.zeros_like(v) if o is None else o, final, last


def _read_before(call: Call, at: Values, rows: Tensor) -> Tensor:
    """Computes S_{t-1}^T row_t for all tokens."""
    state, ends, later = at["initial_state"], at["cu_seqlens"], rows[:, 1:]
    o, _ = call(at | {"q": torch.cat((later, torch.zeros_like(rows[:, :1])), 1), "scale": 1.0})
    o = torch.cat((torch.zeros_like(o[:, :1]), o[:, :-1]), 1)
    if ends is None:
        if state is None:
            return o
        first = torch.einsum("bthk,bhkv->bthv", rows[:, :1], state)
        return torch.cat((first, o[:, 1:]), 1)
    starts, begun = ends[:-1].clamp(max=o.shape[1] - 1), ends.diff() > 0
    first = torch.zeros_like(o[0, starts])
    if state is not None:
        first = torch.einsum("nhk,nhkv->nhv", rows[0, starts], state) * begun[:, None, None]
    inside = torch.ones_like(o[0, :, 0, 0]).index_fill(0, starts[begun], 0)
    return (o * inside[:, None, None]).index_add(1, starts, first[None])


class _Summed:
    """Sums over the tokens of each sequence of the tangents (B, T, H, ..) of decays; False for
    None."""

    def __init__(self, tangents: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.cu_seqlens = cu_seqlens
        self.sums: Tensor | None = None
        if tangents is not None:
            rows = _rows(tangents)
            self.sums = torch.cat((torch.zeros_like(rows[:, :1]), rows.cumsum(1)), 1)

    def __bool__(self) -> bool:
        return self.sums is not None

    def of_tokens(self, before: bool = False) -> Tensor:
        """Returns the sums up to and with each token, or up to the one before."""
        assert self.sums is not None
        sums = self.sums[:, :-1] if before else self.sums[:, 1:]
        if self.cu_seqlens is None:
            return sums
        return sums - _of_tokens(self.sums[0, self.cu_seqlens[:-1]], self.cu_seqlens, sums)

    def of_sequences(self) -> Tensor:
        """Returns the sums of all tokens (N, H, K or 1, 1)."""
        assert self.sums is not None
        if self.cu_seqlens is None:
            return self.sums[:, -1, :, :, None]
        ends = self.sums[0, self.cu_seqlens]
        return ends.diff(dim=0)[..., None]


def _of_tokens(x: Tensor, cu_seqlens: Tensor | None, tokens: Tensor) -> Tensor:
    """Returns for each of the tokens (B, T, ..) the row of its sequence in x (N, H, ..)."""
    if cu_seqlens is None:
        return x[:, None]
    places = torch.arange(tokens.shape[1], device=x.device)
    return x[torch.searchsorted(cu_seqlens, places, right=True, out_int32=False) - 1][None]


def _rows(g: Tensor) -> Tensor:
    """Returns decays (B, T, H, K), or with K = 1 those of heads."""
    return g if g.dim() == 4 else g[..., None]


def _of_each_head(t: Tensor, heads: int) -> Tensor:
    return t.repeat_interleave(heads // max(1, t.shape[2]), 2)


def _plus(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b
