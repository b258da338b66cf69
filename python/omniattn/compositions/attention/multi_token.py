"""Multi-token attention by blocks of queries, with the halo of queries that a block's rows read.

Devices other than the CPU run it.

    S = scale q k^T, 0 where hidden;  C_h = w_h * S_h;  P = softmax(C), 0 where hidden
    A_o = sum_c P_c u_co within groups of heads;  O_o = A_o v

The backward makes P again, block by block. A block adds the gradients of its halo to those that the
blocks before it have found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn.compositions._python_ops import implement
from omniattn.compositions._rows import grouped
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.reference.attention.multi_token import multi_token_attention as definition
from omniattn.reference.precision import compute_dtype, widen

__all__ = ["multi_token_attention"]

#: Logits of a block of queries; smaller blocks have larger halos, larger ones leave the caches.
_LOGITS = 1 << 19
#: Smallest number of rows of a block, for the sake of the halo.
_ROWS = 32


@dataclass(frozen=True)
class _Block:
    """Rows first to end of a batch entry; the rows from `halo` on are read, `pad` are missing."""

    entry: int
    first: int
    end: int
    halo: int
    pad: int
    keys: int
    hidden: Tensor | None

    @property
    def read(self) -> slice:
        return slice(self.halo, self.end)

    @property
    def hidden_rows(self) -> Tensor | None:
        """Hidden keys of the block's own rows."""
        return None if self.hidden is None else self.hidden[self.first - self.halo :]


def _blocks(q: Tensor, k: Tensor, taps: int, causal: bool, lead: int) -> Iterator[_Block]:
    tq, heads, tk = q.shape[1], q.shape[2], k.shape[1]
    rows = max(_ROWS, _LOGITS // max(1, heads * tk))
    for b in range(q.shape[0]):
        for first in range(lead, tq, rows):
            end = min(tq, first + rows)
            halo = max(0, first - taps + 1)
            keys = max(0, end + tk - tq) if causal else tk
            hidden = None
            if causal:
                own = torch.arange(halo + tk - tq, end + tk - tq, device=q.device)
                hidden = torch.arange(keys, device=q.device) > own[:, None]
            if keys:
                yield _Block(b, first, end, halo, taps - 1 - first + halo, keys, hidden)


def _hide(t: Tensor, hidden: Tensor | None, value: float) -> Tensor:
    return t if hidden is None else t.masked_fill_(hidden, value)


def _weights(
    at: _Block, q: Tensor, k: Tensor, weight: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the padded logits S (1, H, rows, keys) and P (H, rows, keys) of a block."""
    s = _hide((scale * q @ k.mT).flatten(0, 1), at.hidden, 0)
    side = weight.shape[2] // 2
    s = torch.nn.functional.pad(s, (side, side, at.pad, 0))[None]
    c = torch.nn.functional.conv2d(s, weight[:, None], groups=len(weight))[0]
    return s, _hide(_hide(c, at.hidden_rows, -torch.inf).softmax(-1), at.hidden_rows, 0)


def _mixed(p: Tensor, head_weight: Tensor) -> Tensor:
    """Maps the weights (H, rows, keys) of each group of heads by head_weight (N, in, out)."""
    groups = p.reshape(*head_weight.shape[:2], -1)
    return (head_weight.mT @ groups).view_as(p)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    head_weight: Tensor,
    causal: bool,
    scale: float,
    lead: int,
) -> Tensor:
    heads = k.shape[2]
    out = q.new_zeros(q.shape[0], q.shape[1] - lead, q.shape[2], v.shape[3])
    if out.numel() == 0:
        return out
    w, u = widen(weight), widen(head_weight)
    for at in _blocks(q, k, w.shape[1], causal, lead):
        b, keys = at.entry, slice(0, at.keys)
        _, p = _weights(at, grouped(q[b, at.read], heads), grouped(k[b, keys], heads), w, scale)
        a = _mixed(p, u).unflatten(0, (heads, -1))
        found = (a @ grouped(v[b, keys], heads)).permute(2, 0, 1, 3).flatten(1, 2)
        out[b, at.first - lead : at.end - lead] = found.to(q.dtype)
    return out


def _backward(
    grad_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    head_weight: Tensor,
    causal: bool,
    scale: float,
    lead: int,
    *wanted: bool,
) -> tuple[Tensor, ...]:
    heads, wide = k.shape[2], compute_dtype(q)
    found = [t.new_zeros(t.shape, dtype=wide) for t in (q, k, v, weight, head_weight)]
    dq, dk, dv, dw, du = found
    if grad_out is not None and grad_out.numel() > 0:
        w, u = widen(weight), widen(head_weight)
        for at in _blocks(q, k, w.shape[1], causal, lead):
            b, keys = at.entry, slice(0, at.keys)
            qs, ks, vs = (grouped(t, heads) for t in (q[b, at.read], k[b, keys], v[b, keys]))
            grads = grouped(grad_out[b, at.first - lead : at.end - lead], heads)
            s, p = _weights(at, qs, ks, w, scale)
            a = _mixed(p, u).unflatten(0, (heads, -1))
            dv[b, keys] += (a.mT @ grads).sum(1).transpose(0, 1)
            da = (grads @ vs.mT).flatten(0, 1)
            sides = (t.reshape(*u.shape[:2], -1) for t in (p, da))
            du += next(sides) @ next(sides).mT
            dp = _hide(_mixed(da, u.mT), at.hidden_rows, 0)
            dc = (p * (dp - (p * dp).sum(-1, keepdim=True)))[None]
            windows = s[0].unfold(-1, w.shape[2], 1)
            for a in range(w.shape[1]):  # three times as fast as torch's gradient
                rows = windows[:, a : a + at.end - at.first]
                dw[:, a] += torch.einsum("hik,hikb->hb", dc[0], rows)
            ds = torch.nn.functional.conv_transpose2d(dc, w[:, None], groups=len(w))[0]
            side = w.shape[2] // 2
            ds = ds[:, at.pad :, side : side + at.keys]
            ds = scale * _hide(ds, at.hidden, 0).unflatten(0, (heads, -1))
            dq[b, at.read] += (ds @ ks).permute(2, 0, 1, 3).flatten(1, 2)
            dk[b, keys] += (ds.mT @ qs).sum(1).transpose(0, 1)
    return tuple(
        d.to(q.dtype) if needed else q.new_empty(0) for d, needed in zip(found, wanted, strict=True)
    )


_TENSORS = {"q": "B Tq H D", "k": "B Tk Hkv D", "v": "B Tk Hkv Dv"}
_TENSORS |= {"weight": "H cq ck", "head_weight": "N C C"}
implement("multi_token_attention", _forward, _TENSORS, differentiable=True)
implement("multi_token_attention_backward", _backward, {"grad_out": "B To H Dv", **_TENSORS})


def _out(q: Tensor, v: Tensor, lead: int) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] - lead, q.shape[2], v.shape[3]))


#: (q, k, v, weight, head_weight, causal, scale, lead) -> out
multi_token_attention = DifferentiableOp(
    "multi_token_attention",
    fakes={"out": _out},
    formula=lambda q, k, v, weight, head_weight, causal, scale, lead: definition(
        *(q, k, v, weight, head_weight), causal=causal, scale=scale, lead=lead
    ),
)
