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

from omniattn.ops.derivatives.tokens import first_tokens, last_tokens, previous_tokens
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
    state.

    A token's own product has not decayed. With tangents of decays, `_delayed` leaves these products
    out of the calls: their factors c'_t - c'_t would be rounding errors that exceed the tangents of
    strong decays.
    """
    q, k, v, a, b, bonus, ends = (at[n] for n in _READ)
    moved_q, moved_k, moved_v, moved_a, moved_b = (along[n] for n in ("q", "k", "v", "a", "b"))
    decay, of_values = (_Summed(_of_lasting(at[n], along[n]), ends) for n in ("g", "gv"))
    delay = bool(decay or of_values)
    if decay or bonus is not None:
        rows = (q, k, a, b, moved_q, moved_k, moved_a, moved_b)
        q, k, a, b, moved_q, moved_k, moved_a, moved_b = (
            None if t is None else _of_each_head(t, v.shape[2]) for t in rows
        )
    later, earlier, written = moved_q, moved_k, moved_v
    if decay:
        later = _plus(later, decay.of_tokens(before=bonus is not None) * q)
        earlier = _plus(earlier, -decay.of_tokens() * k)
        if a is not None:
            moved_a = _plus(moved_a, decay.of_tokens(before=True) * a)
            moved_b = _plus(moved_b, -decay.of_tokens() * b)
    if of_values:
        written = _plus(written, -of_values.of_tokens() * v)
    at = at | {"q": q, "k": k, "a": a, "b": b}

    def write(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        values = at | {"q": q, "k": k, "v": v, "initial_state": state}
        return call(_delayed(values) if delay else values)

    o = final = last = None
    if later is not None:
        o, last = write(later, k, v, at["initial_state"])
        final = decay.of_sequences() * last if decay else None
    start = along["initial_state"]
    if earlier is None and start is not None:
        earlier = torch.zeros_like(k)
    for row, value, state in ((earlier, v, start), (k, written, None)):
        if row is not None and value is not None:
            found, added = write(q, row, value, state)
            o, final = _plus(o, found), _plus(final, added)
    if of_values:
        found, last = write(q, k, v, at["initial_state"])
        o = _plus(o, of_values.of_tokens() * found)
        final = _plus(final, of_values.of_sequences().mT * last)
    for row, read in ((b, moved_a), (moved_b, a)):
        if row is not None and read is not None:
            value = _read_before(call, at, read)
            found, added = call(at | {"k": row, "v": value, "initial_state": None})
            o, final = _plus(o, found), _plus(final, added)

    scale, of_token = at["scale"], None if bonus is None else _of_tokens(bonus, ends, v)
    if delay:
        for x, y, z in ((moved_q, k, v), (q, moved_k, v), (q, k, moved_v)):
            if x is not None and y is not None and z is not None:
                o = _plus(o, scale * _own_products(x, y, z, of_token, ends))
        for x, z in ((moved_k, v), (k, moved_v)):
            if x is not None and z is not None:
                final = _plus(final, _last_products(x, z, ends))
        last = _plus(last, _last_products(k, v, ends))
    if along["bonus"] is not None:
        weight = _of_tokens(along["bonus"], ends, v) * q * k
        o = _plus(o, scale * weight.sum(-1, keepdim=True) * v)
    if final is None:
        count = v.shape[0] if ends is None else ends.shape[0] - 1
        final = v.new_zeros(count, v.shape[2], k.shape[3], v.shape[3])
    return torch.zeros_like(v) if o is None else o, final, last


def _delayed(at: Values) -> Values:
    """Returns a recurrence whose state is that of `at` without the products k_t v_t^T of its last
    token; a bonus is left out, too."""
    g, gv, a, bonus, ends = (at[n] for n in ("g", "gv", "a", "bonus", "cu_seqlens"))
    row, value = (previous_tokens(at[n], ends) for n in ("k", "v"))
    k = row if g is None else _rows(g).exp() * row
    if a is not None:
        k = k + at["b"] * (a * row).sum(-1, keepdim=True)
    v = value if gv is None else gv.exp() * value
    return at | {"k": k, "v": v, "bonus": None if bonus is None else torch.zeros_like(bonus)}


def _own_products(
    q: Tensor, k: Tensor, v: Tensor, bonus: Tensor | None, ends: Tensor | None
) -> Tensor:
    """Computes what outputs read of the products that `_delayed` leaves out."""
    if bonus is None:
        return (q * k).sum(-1, keepdim=True) * v
    row, value = previous_tokens(k, ends), previous_tokens(v, ends)
    return (q * row).sum(-1, keepdim=True) * value + (q * bonus * k).sum(-1, keepdim=True) * v


def _last_products(k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
    """Computes k_t v_t^T of the last token of each sequence, zeros of empty ones."""
    return last_tokens(k, ends)[..., None] * last_tokens(v, ends)[..., None, :]


def _read_before(call: Call, at: Values, rows: Tensor) -> Tensor:
    """Computes S_{t-1}^T row_t for all tokens."""
    if rows.shape[1] == 0:
        return at["v"]
    state, ends = at["initial_state"], at["cu_seqlens"]
    later = torch.cat((rows[:, 1:], torch.zeros_like(rows[:, :1])), 1)
    o, _ = call(at | {"q": later, "scale": 1.0})
    first = None
    if state is not None:
        first = torch.einsum("nhk,nhkv->nhv", first_tokens(rows, ends), state)
    return previous_tokens(o, ends, first)


def _of_lasting(g: Tensor, moved: Tensor | None) -> Tensor | None:
    """Returns tangents of decays, with zeros for those with e^g = 0, whose sums lose digits."""
    return None if moved is None else torch.where(g.exp() > 0, moved, 0)


class _Summed:
    """Sums over the tokens of each sequence of the tangents (B, T, H, ..) of decays; False for
    None."""

    def __init__(self, tangents: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.cu_seqlens = cu_seqlens
        self.sums: Tensor | None = None
        if tangents is not None:
            rows = _rows(tangents)
            zero = torch.zeros_like(rows.sum(1, keepdim=True))
            self.sums = torch.cat((zero, rows.cumsum(1)), 1)

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
