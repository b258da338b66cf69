"""TTT-Linear: steps of gradient descent on a linear model, one for each mini-batch of C tokens.

All gradients of a mini-batch are taken at its first weights W, so that only W goes from one to the
next: ``z = k W + b``, ``u = lr * dloss/dz`` and ``W' = W - eta_C k^T u`` in turn. Outputs and most
gradients are products for all mini-batches together. Tensors of mini-batches are (n, B H, C, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.compositions._python_ops import define
from omniattn.compositions._sequences import batches
from omniattn.ops._autograd import DifferentiableOp
from omniattn.ops._backward import BackwardOp
from omniattn.reference.ttt import ttt_steps as definition

__all__ = ["ttt_steps"]


class _Rows(NamedTuple):
    """Tokens of sequences at one position, in mini-batches, with zeros for absent tokens.

    w and b are (B H, 1, D). `keep` (n, 1, C, 1) is 0 for absent tokens, or None if there are none.
    `complete` is the number of mini-batches whose last token is there.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    lr: Tensor | None
    w: Tensor
    b: Tensor
    keep: Tensor | None
    complete: int
    eps: float

    def normalised(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of z with mean 0 and variance 1, their means, and 1 / deviation."""
        found: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(
            z, [z.shape[-1]], None, None, self.eps
        )
        return found

    def masked(self, t: Tensor, n: int) -> Tensor:
        return t if self.keep is None else t * self.keep[n]


class _State(NamedTuple):
    """Weights (B H, D, D) and bias (B H, 1, D), and sums of the open mini-batch's gradients."""

    w: Tensor
    b: Tensor
    dw: Tensor
    db: Tensor


def _grid(t: Tensor, first: int, size: int) -> Tensor:
    """Returns t (B, T, H, D) as (n, B H, size, D), whose token 0 is at place `first`."""
    after = -(first + t.shape[1]) % size
    t = nnf.pad(t.transpose(1, 2), (0, 0, first, after)).unflatten(2, (-1, size))
    return t.movedim(2, 0).flatten(1, 2).contiguous()


def _tokens(t: Tensor, like: Tensor, first: int) -> Tensor:
    """Returns mini-batches (n, B H, size, D) as (B, T, H, D) with the sizes of `like`."""
    batch, steps, heads = like.shape[:3]
    t = t.unflatten(1, (batch, heads)).movedim(0, 2).flatten(2, 3)
    return t[:, :, first : first + steps].transpose(1, 2)


def _slope(g: Tensor, z: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Returns the gradient of z, from that of its normalised rows."""
    found: Tensor = torch.ops.aten.native_layer_norm_backward(
        g, z, [z.shape[-1]], mean, rstd, None, None, [True, False, False]
    )[0]
    return found


def _rows_of(
    inputs: tuple[Tensor, ...],
    w: Tensor,
    b: Tensor,
    place: int,
    size: int,
    eps: float,
) -> _Rows:
    """Makes mini-batches of q, k, v (B, T, H, D), eta and lr (B, T, H)."""
    q, k, v = (_grid(t, place, size) for t in inputs[:3])
    eta, *lr = (_grid(t[..., None], place, size) for t in inputs[3:])
    batch, steps = inputs[0].shape[:2]
    keep = None
    if place > 0 or (place + steps) % size:
        ones = q.new_ones(1, steps, 1, 1)
        keep = _grid(ones, place, size)
    w, b = (t.repeat(batch, 1)[:, None] for t in (w, b))
    complete = (place + steps) // size
    return _Rows(q, k, v, eta, lr[0] if lr else None, w, b, keep, complete, eps)


def _descend(x: _Rows, state: _State) -> tuple[Tensor, Tensor, Tensor, Tensor, _State]:
    """Returns z, u, and W and b at the starts of mini-batches, and the state after the last one."""
    w, b, dw, db = state
    last = x.eta[:, :, -1:]
    kept, target = last * x.k, x.b - (x.v - x.k)
    zs, us = torch.empty_like(x.q), torch.empty_like(x.q)
    ws, bs = w.new_empty(len(zs), *w.shape), b.new_empty(len(zs), *b.shape)
    for n in range(len(zs)):
        ws[n], bs[n] = w, b
        z = torch.baddbmm(b, x.k[n], w)
        normal, mean, rstd = x.normalised(z)
        gap = x.w * torch.addcmul(target[n], x.w, normal)
        u = _slope(gap, z, mean, rstd)
        if x.lr is not None:
            u = u * x.lr[n]
        zs[n], us[n] = z, x.masked(u, n)
        if n >= x.complete:
            dw = torch.baddbmm(dw, x.k[n].mT, us[n])
            db = db + us[n].sum(1, keepdim=True)
            continue
        w = torch.baddbmm(w, kept[n].mT, us[n], alpha=-1)
        b = torch.addcmul(b, last[n], us[n].sum(1, keepdim=True), value=-1)
        if n == 0:
            w, b = w - last[0] * dw, b - last[0] * db
            dw, db = torch.zeros_like(dw), torch.zeros_like(db)
    return zs, us, ws, bs, _State(w, b, dw, db)


def _weights(x: _Rows) -> Tensor:
    """Returns the weights (n, B H, C, C) of u in outputs, without the factor -eta of a row."""
    return (x.q @ x.k.mT).add_(1).tril_()


def _outputs(x: _Rows, us: Tensor, ws: Tensor, bs: Tensor, state: _State) -> Tensor:
    o = (x.q @ ws).add_(bs)
    o -= x.eta * (_weights(x) @ us)
    o[0] -= x.eta[0] * torch.baddbmm(state.db, x.q[0], state.dw)
    return o


def _differentiate(
    x: _Rows, state: _State, zs: Tensor, us: Tensor, grad: Tensor, final: _State
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor, _State]:
    """Returns the gradients of q, k, v and eta, of lr, w and b, and of the state.

    `grad` are the gradients of outputs, and `final` those of the state after the last token.
    """
    last = x.eta[:, :, -1:]
    ws = _starts(x, state, us)
    weights = _weights(x)
    e = x.eta * grad
    du = -(weights.mT @ e)
    slopes = -(e @ us.mT).tril_()
    dq, dk = grad @ ws.mT + slopes @ x.k, slopes.mT @ x.q
    inner = weights @ us
    inner[0] += torch.baddbmm(state.db, x.q[0], state.dw)
    deta = -(grad * inner).sum(-1, keepdim=True)
    dq[0] -= e[0] @ state.dw.mT
    later_w, later_b = x.q.mT @ grad, grad.sum(2, keepdim=True)

    # Values of all mini-batches that the gradient of u reads.
    normal, mean, rstd = x.normalised(zs)
    y = torch.addcmul(x.b - (x.v - x.k), x.w, normal)
    gap = x.w * y
    common = (gap * normal).mean(-1, keepdim=True)
    plain = gap - gap.mean(-1, keepdim=True) - normal * common  # u / (lr rstd)
    dz, dgap = torch.empty_like(zs), torch.empty_like(zs)
    gw, gb, gdw, gdb = final
    for n in reversed(range(len(zs))):
        if n < x.complete:
            step_w, step_b, factor = gw, gb, -last[n]
        else:
            step_w, step_b, factor = gdw, gdb, torch.ones_like(last[n])
        read = torch.baddbmm(step_b, x.k[n], step_w)
        du[n] += factor * read
        dk[n] += factor * (us[n] @ step_w.mT)
        if n < x.complete:
            deta[n, :, -1:] -= (read * us[n]).sum((1, 2), keepdim=True)
        if n == 0:
            if x.complete > 0:
                own = (gw * state.dw).sum((1, 2), keepdim=True) + (gb * state.db).sum(
                    (1, 2), keepdim=True
                )
                deta[0, :, -1:] -= own
            gdw = factor * step_w - x.q[0].mT @ e[0]
            gdb = factor * step_b - e[0].sum(1, keepdim=True)
        du[n] = x.masked(du[n], n)
        of_u = du[n] if x.lr is None else du[n] * x.lr[n]
        dgap[n] = _slope(of_u, zs[n], mean[n], rstd[n])
        dt = rstd[n] * of_u
        dnormal = x.w.square() * dgap[n] - common[n] * dt
        dnormal -= gap[n] * (dt * normal[n]).mean(-1, keepdim=True)
        dz[n] = _slope(dnormal, zs[n], mean[n], rstd[n])
        spread = (of_u * plain[n]).mean(-1, keepdim=True) * rstd[n].square()
        dz[n] -= spread * normal[n]
        gw = torch.baddbmm(gw + later_w[n], x.k[n].mT, dz[n])
        gb = gb + later_b[n] + dz[n].sum(1, keepdim=True)
    dy = x.w * dgap
    dk += dz @ ws.mT + dy
    dw = (dgap * y + dy * normal).sum((0, 2))
    dlr = None if x.lr is None else (du * plain * rstd).sum(-1, keepdim=True)
    return [dq, dk, -dy, deta], dlr, dw, dy.sum((0, 2)), _State(gw, gb, gdw, gdb)


def _starts(x: _Rows, state: _State, us: Tensor) -> Tensor:
    """Returns W at the starts of mini-batches."""
    w, ws = state.w, x.q.new_empty(len(us), *state.w.shape)
    for n, u in enumerate(us):
        ws[n] = w
        if n < x.complete:
            step = x.eta[n, :, -1:]
            w = torch.baddbmm(w, (step * x.k[n]).mT, u, alpha=-1)
            w = w - step * state.dw if n == 0 else w
    return ws


def _state_of(rows: slice, given: tuple[Tensor | None, ...], like: Tensor, batch: int) -> _State:
    """Returns the states of some sequences, zeros where none are given."""
    heads, size = like.shape[2:]
    shapes = ((batch, heads, size, size), (batch, heads, size)) * 2
    w, b, dw, db = (
        like.new_zeros(shape) if t is None else t[rows]
        for t, shape in zip(given, shapes, strict=True)
    )
    return _State(
        w.flatten(0, 1), b.flatten(0, 1)[:, None], dw.flatten(0, 1), db.flatten(0, 1)[:, None]
    )


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _require_sequences(
    q: Tensor,
    size: int,
    cu_seqlens: Tensor | None,
    position: Tensor | None,
    states: tuple[Tensor | None, ...],
) -> None:
    """Requires as many states and positions as sequences."""
    op, count = "ttt_linear", _sequences(q, cu_seqlens)
    for name, t in (("position", position), *zip(_STATES, states, strict=True)):
        if t is not None and t.shape[0] != count:
            raise ValueError(f"{op}: {name} must have {count} rows, got {tuple(t.shape)}")
    if cu_seqlens is not None and (q.shape[0] != 1 or count < 0):
        raise ValueError(f"{op}: packed q must have a batch of 1, got q.shape={tuple(q.shape)}")
    if size < 1:
        raise ValueError(f"{op}: mini_batch_size must be at least 1, got {size}")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    lr: Tensor | None,
    w: Tensor,
    b: Tensor,
    w_state: Tensor | None,
    b_state: Tensor | None,
    dw_state: Tensor | None,
    db_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    mini_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    given = w_state, b_state, dw_state, db_state
    _require_sequences(q, mini_batch_size, cu_seqlens, position, given)
    if q.shape[1] == 1 and cu_seqlens is None and position is not None and q.numel() > 0:
        return _step((q, k, v, eta), lr, w, b, given, position, mini_batch_size, eps)
    tensors = (q, k, v, eta) if lr is None else (q, k, v, eta, lr)
    y, z, u = (torch.empty_like(q) for _ in range(3))
    finals = _finals(q, cu_seqlens)
    for rows, steps, own, place in batches(q, position, cu_seqlens):
        inputs = tuple(t[rows, steps] for t in tensors)
        state = _state_of(own, given, q, finals[0][own].shape[0])
        if steps.start < steps.stop and q.numel() > 0:
            first = place % mini_batch_size
            x = _rows_of(inputs, w, b, first, mini_batch_size, eps)
            zs, us, ws, bs, last = _descend(x, state)
            found = _outputs(x, us, ws, bs, state), zs, us
            for output, part in zip((y, z, u), found, strict=True):
                output[rows, steps] = _tokens(part, inputs[0], first)
            state = last
        for final, part in zip(finals, state, strict=True):
            final[own] = part.view_as(final[own])
    return y, *finals, z, u


def _step(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    lr: Tensor | None,
    w: Tensor,
    b: Tensor,
    given: tuple[Tensor | None, ...],
    position: Tensor,
    size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Computes one token of each sequence, as the definition does."""
    q, k, v, eta = (t[:, 0] for t in inputs)
    zeros = _finals(inputs[0], None)
    weights, bias, dw, db = (
        z.zero_() if t is None else t for t, z in zip(given, zeros, strict=True)
    )
    z = (k[..., None, :] @ weights)[..., 0, :] + bias
    normal, mean, rstd = torch.native_layer_norm(z, [z.shape[-1]], None, None, eps)
    u = _slope(w * torch.addcmul(b - (v - k), w, normal), z, mean, rstd)
    if lr is not None:
        u = u * lr[:, 0, :, None]
    dw, db = torch.addcmul(dw, k[..., None], u[..., None, :]), db + u
    step = eta[..., None]
    y = (q[..., None, :] @ weights)[..., 0, :] + bias
    y -= step * ((q[..., None, :] @ dw)[..., 0, :] + db)
    ends = ((position + 1) % size == 0)[:, None, None].to(q.dtype)
    if bool(ends.any()):
        weights = torch.addcmul(weights, (ends * step)[..., None], dw, value=-1)
        bias = torch.addcmul(bias, ends * step, db, value=-1)
        dw, db = dw * (1 - ends)[..., None], db * (1 - ends)
    else:
        weights, bias = weights.clone(), bias.clone()
    return y[:, None], weights, bias, dw, db, z[:, None], u[:, None]


def _finals(q: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns empty states after the last tokens."""
    count, heads, size = _sequences(q, cu_seqlens), *q.shape[2:]
    w, b = q.new_empty(count, heads, size, size), q.new_empty(count, heads, size)
    return w, b, torch.empty_like(w), torch.empty_like(b)


def _backward(
    grad_y: Tensor | None,
    grad_w_final: Tensor | None,
    grad_b_final: Tensor | None,
    grad_dw_final: Tensor | None,
    grad_db_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    lr: Tensor | None,
    w: Tensor,
    b: Tensor,
    w_state: Tensor | None,
    b_state: Tensor | None,
    dw_state: Tensor | None,
    db_state: Tensor | None,
    position: Tensor | None,
    cu_seqlens: Tensor | None,
    mini_batch_size: int,
    eps: float,
    z: Tensor,
    u: Tensor,
) -> tuple[Tensor, ...]:
    given = w_state, b_state, dw_state, db_state
    incoming = grad_w_final, grad_b_final, grad_dw_final, grad_db_final
    for states in (given, incoming):
        _require_sequences(q, mini_batch_size, cu_seqlens, position, states)
    tensors = (q, k, v, eta) if lr is None else (q, k, v, eta, lr)
    grads = [torch.zeros_like(t) for t in tensors]
    dw, db = torch.zeros_like(w), torch.zeros_like(b)
    totals = tuple(t.zero_() for t in _finals(q, cu_seqlens))
    for rows, steps, own, place in batches(q, position, cu_seqlens):
        count = totals[0][own].shape[0]
        after = _state_of(own, incoming, q, count)
        if steps.start < steps.stop and q.numel() > 0:
            first = place % mini_batch_size
            inputs = tuple(t[rows, steps] for t in tensors)
            x = _rows_of(inputs, w, b, first, mini_batch_size, eps)
            state = _state_of(own, given, q, count)
            grad = torch.zeros_like(q) if grad_y is None else grad_y
            zs, us, out = (_grid(t[rows, steps], first, mini_batch_size) for t in (z, u, grad))
            found, of_lr, of_w, of_b, after = _differentiate(x, state, zs, us, out, after)
            found = found if of_lr is None else [*found, of_lr]
            for total, part in zip(grads, found, strict=True):
                own_part = _tokens(part, inputs[0], first)
                total[rows, steps] = own_part if total.dim() == 4 else own_part[..., 0]
            dw += of_w.view(-1, *w.shape).sum(0)
            db += of_b.view(-1, *b.shape).sum(0)
        for total, part in zip(totals, after, strict=True):
            total[own] = part.view_as(total[own])
    if lr is None:
        grads.append(q.new_empty(0))
    pairs = zip(given, totals, strict=True)
    return (*grads, dw, db, *(q.new_empty(0) if t is None else total for t, total in pairs))


#: N sequences.
_ROWS = dict.fromkeys(("q", "k", "v"), "B T H D") | {"eta": "B T H", "lr": "B T H"}
_ROWS |= {"w": "H D", "b": "H D"}
_STATES = {"w_state": "N H D D", "b_state": "N H D", "dw_state": "N H D D", "db_state": "N H D"}
_OPTIONAL = _STATES | {"position": "N", "cu_seqlens": "N+1"}
_FINALS = {name.replace("state", "final"): shape for name, shape in _STATES.items()}
_ARGUMENTS = ", ".join(
    [
        *(f"Tensor{'?' if name == 'lr' else ''} {name}" for name in _ROWS),
        *(f"Tensor? {name}" for name in _OPTIONAL),
        "int mini_batch_size, float eps",
    ]
)
define(
    "ttt_linear",
    _ARGUMENTS,
    ", ".join(f"Tensor {name}" for name in ("y", *_FINALS, "z", "u")),
    _forward,
    _ROWS | _OPTIONAL,
    differentiable=True,
)
define(
    "ttt_linear_backward",
    ", ".join(
        [
            *(f"Tensor? grad_{name}" for name in ("y", *_FINALS)),
            _ARGUMENTS,
            "Tensor z, Tensor u",
        ]
    ),
    ", ".join(f"Tensor d{name}" for name in (*_ROWS, *_STATES)),
    _backward,
    {
        "grad_y": "B T H D",
        **{f"grad_{name}": shape for name, shape in _FINALS.items()},
        **_ROWS,
        **_OPTIONAL,
        **{"mini_batch_size": "", "eps": "", "z": "B T H D", "u": "B T H D"},
    },
)


def _final(place: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda q, cu_seqlens: _finals(q, cu_seqlens)[place]


#: (q, k, v, eta, lr, w, b, w_state, b_state, dw_state, db_state, position, cu_seqlens,
#: mini_batch_size, eps) -> (y, w_final, b_final, dw_final, db_final)
ttt_steps = DifferentiableOp(
    "ttt_linear",
    fakes={name: _final(place) for place, name in enumerate(_FINALS)},
    private=("z", "u"),
    backward_op=BackwardOp("ttt_linear_backward"),
    formula=lambda *args: definition(*args),
)
