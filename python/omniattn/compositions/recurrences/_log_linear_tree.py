"""Outputs and gradients of log-linear attention of sequences that start at one position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.compositions.recurrences import _log_linear_chunks as chunks
from omniattn.compositions.recurrences._log_linear_chunks import sums_after, sums_before
from omniattn.reference.precision import compute_dtype

__all__ = ["Tokens", "differentiate", "outputs"]

#: Largest number of tokens of a chunk, a power of two.
CHUNK = 64


class Tokens(NamedTuple):
    """Tokens in chunks of C, and the places of their sequences.

    Sequences and heads are one dimension Z. Token i of the first chunk is at position `base + i`,
    and the first `front` tokens are zeros, so that base is a multiple of C 2^top tokens, which is
    at least T.
    """

    q: Tensor  # (Z, n, C, K)
    k: Tensor
    v: Tensor  # (Z, n, C, G, V), G value heads of a key head
    g: Tensor  # (Z, n, C, G)
    scales: Tensor  # (Z, n, C, G, L)
    state: Tensor | None  # (L, Z, K, G V)
    heads: int
    groups: int
    steps: int
    front: int
    base: int
    top: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scales: Tensor,
        state: Tensor | None,
        position: int,
    ) -> Tokens:
        """Arranges tensors (N, T, ...) and a state (N, Hv, L, K, V)."""
        steps, heads = q.shape[1:3]
        groups, bits = v.shape[2] // max(1, heads), (steps - 1).bit_length()
        size = min(CHUNK, 1 << bits)
        front = position % (1 << bits)
        top = bits - (size.bit_length() - 1)
        places = (heads, groups, steps, front, position - front, top)
        dtype = compute_dtype(v)
        q, k = (arranged(t.to(dtype), size, heads, 1, front).squeeze(3) for t in (q, k))
        v, g, scales = (arranged(t.to(dtype), size, heads, groups, front) for t in (v, g, scales))
        x = cls(q, k, v, g, scales, None, *places)
        return x if state is None else x._replace(state=x.states(state))

    def states(self, state: Tensor) -> Tensor:
        """Maps states (N, Hv, L, K, V) to (L, Z, K, G V)."""
        each = state.unflatten(1, (self.heads, self.groups)).permute(3, 0, 1, 4, 2, 5)
        return each.flatten(4).flatten(1, 2).to(self.v.dtype).contiguous()

    def states_restored(self, states: Tensor) -> Tensor:
        """Maps states (L, Z, K, G V) to (N, Hv, L, K, V)."""
        each = states.unflatten(-1, self.v.shape[3:]).unflatten(1, (-1, self.heads))
        return each.permute(1, 2, 4, 0, 3, 5).flatten(1, 2)

    @property
    def chunk(self) -> int:
        return self.q.shape[2]

    @property
    def position(self) -> int:
        return self.base + self.front

    def restored(self, t: Tensor) -> Tensor:
        """Maps rows (Z, n, C, G, ...) back to (N, T, H G, ...)."""
        t = t.flatten(1, 2)[:, self.front : self.front + self.steps]
        return t.unflatten(0, (-1, self.heads)).movedim(1, 2).flatten(2, 3)

    def level(self, m: int) -> int:
        """Returns the scale with which blocks of 2^m chunks read the blocks before them."""
        width = self.chunk << m
        return (self.base // width ^ (self.base // width + 1)).bit_length() + (
            width.bit_length() - 1
        )


def arranged(t: Tensor, size: int, heads: int, groups: int, front: int) -> Tensor:
    """Maps rows (N, T, H G, ...) to (Z, n, C, G, ...), with `front` zeros before the first one."""
    t = t.unflatten(2, (heads, groups))
    full = -(front + t.shape[1]) % size
    t = nnf.pad(t.movedim(2, 1), (0, 0) * (t.dim() - 3) + (front, full)).contiguous()
    return t.flatten(0, 1).unflatten(1, (-1, size))


def slots(position: int) -> list[int]:
    """Returns the bits of `position` that are set, whose states hold its tokens."""
    return [b for b in range(position.bit_length()) if position >> b & 1]


class Tree(NamedTuple):
    """States of blocks of 2^m chunks, and logarithms of decays."""

    nodes: list[Tensor]  # of each m: (Z, n_m, K, G V)
    totals: list[Tensor]  # of each m: (Z, n_m, G), decays of the blocks
    starts: list[Tensor]  # of each m: (Z, n, G), decays from a block's start to each chunk
    inside: Tensor  # (Z, n, C, G), from a chunk's start to each token
    behind: Tensor  # (Z, n, C, G), from each token to its chunk's end
    tail: Tensor  # (Z, n, G), from each chunk's end to the last one's


def tree_of(x: Tokens) -> Tree:
    """Computes the states of blocks, each decayed to its block's end."""
    inside, behind = x.g.cumsum(2), sums_after(x.g, 2)
    values = (x.v * behind.exp()[..., None]).flatten(3)
    node, total = x.k.mT @ values, inside[:, :, -1]
    nodes, totals = [node], [total]
    start = torch.zeros_like(total)
    starts = [start]
    m, count = 0, total.shape[1]
    while node.shape[1] > 1:
        pairs = node.shape[1] // 2
        right, rest = total[:, 1 : 2 * pairs : 2], node[:, 2 * pairs :]
        joined = node[:, : 2 * pairs : 2] * spread(right, node) + node[:, 1 : 2 * pairs : 2]
        start = start.clone()
        for blocks, first in readers(start, count, m):
            blocks += total[:, first][:, :, None]
        node = torch.cat((joined, rest), 1)
        left = total[:, : 2 * pairs : 2]
        total = torch.cat((left + right, total[:, 2 * pairs :]), 1)
        nodes.append(node)
        totals.append(total)
        starts.append(start)
        m += 1
    return Tree(nodes, totals, starts, inside, behind, sums_after(totals[0], 1))


def spread(decay: Tensor, state: Tensor) -> Tensor:
    """Returns exp of decays (..., G) as factors (..., 1, G V) of states (..., K, G V)."""
    size = state.shape[-1] // max(1, decay.shape[-1])
    return decay.exp().repeat_interleave(size, -1)[..., None, :]


def readers(t: Tensor, count: int, m: int) -> Iterator[tuple[Tensor, slice]]:
    """Yields the second blocks (Z, b, w, ...) of pairs of blocks of 2^m chunks of t (Z, n, ...),
    which read the first ones, and the places of these among the nodes: all pairs that are whole,
    then one whose second block ends early."""
    width, pairs = 1 << m, count >> (m + 1)
    if pairs > 0:
        whole = t[:, : 2 * width * pairs].unflatten(1, (pairs, 2, width))
        yield whole[:, :, 1], slice(0, 2 * pairs, 2)
    if count - 2 * width * pairs > width:
        first = 2 * width * pairs + width
        yield t[:, None, first:], slice(2 * pairs, 2 * pairs + 1)


def old_scales(x: Tokens, slot: int) -> Tensor:
    """Returns (n C), the levels at which the tokens read the initial state of a slot."""
    at = x.base + torch.arange(x.q.shape[1] * x.chunk, device=x.q.device)
    differs = torch.frexp((at ^ x.position).double())[1]
    return differs.clamp(min=slot + 1, max=x.scales.shape[-1] - 1).long()


def rows_of(levels: Tensor, t: Tensor) -> Tensor:
    """Expands levels (n C) to an index (Z, n, C, G, 1) of scales t."""
    return levels.view(1, t.shape[1], t.shape[2], 1, 1).expand(*t.shape[:4], 1)


def outputs(x: Tokens) -> tuple[Tensor, Tensor]:
    """Returns y (N, T, Hv, V) and the final state (N, Hv, L, K, V)."""
    y, tree, count = chunks.outputs(x.q, x.k, x.v, x.g, x.scales), tree_of(x), x.q.shape[1]
    for m in range(len(tree.nodes) - 1):
        decay = tree.inside + tree.starts[m][:, :, None]
        factor = decay.exp_() * x.scales[..., x.level(m)]
        triples = (readers(t, count, m) for t in (y, x.q, factor))
        for (into, left), (q, _), (by, _) in zip(*triples, strict=True):
            read = q.flatten(2, 3) @ tree.nodes[m][:, left]
            into.addcmul_(read.view(into.shape), by[..., None])
    before = tree.inside + sums_before(tree.totals[0], 1)[:, :, None]
    if x.state is not None:
        for b in slots(x.position):
            by = before.exp() * x.scales.gather(-1, rows_of(old_scales(x, b), x.scales))[..., 0]
            read = x.q.flatten(1, 2) @ x.state[b]
            y.addcmul_(read.view(y.shape), by[..., None])
    final = x.k.new_zeros(x.scales.shape[-1], *tree.nodes[0].shape[::2], tree.nodes[0].shape[3])
    last = before[:, -1, -1]
    for b in slots(x.position + x.steps):
        final[b] = slot_of(x, tree, b, last)
    return x.restored(y), x.states_restored(final)


def block_of(x: Tokens, slot: int) -> tuple[int, int]:
    """Returns first and end of the block of a slot of the final state, as places of tokens."""
    end = x.position + x.steps
    first = (end >> (slot + 1) << (slot + 1)) - x.base
    return first, first + (1 << slot)


def old_slots(x: Tokens, slot: int) -> list[int]:
    """Returns the slots of the initial state whose tokens are in a slot of the final one."""
    first, end = block_of(x, slot)
    if x.state is None or first >= x.front:
        return []
    return [slot] if end <= x.front else [b for b in slots(x.position) if b < slot]


def node_of(x: Tokens, tree: Tree, slot: int) -> tuple[int, int, Tensor]:
    """Returns level and place of the node of a slot of at least a chunk, and its decay."""
    first, end = block_of(x, slot)
    m = min(slot - (x.chunk.bit_length() - 1), x.top)
    return m, max(first, 0) // (x.chunk << m), tree.tail[:, end // x.chunk - 1]


def part_of(x: Tokens, tree: Tree, slot: int) -> tuple[int, slice, Tensor]:
    """Returns chunk, tokens and decays (Z, c, G) of a slot of less than a chunk."""
    first, end = block_of(x, slot)
    place = max(first, 0) // x.chunk
    tokens = slice(max(first, 0) - place * x.chunk, end - place * x.chunk)
    return place, tokens, tree.behind[:, place, tokens] + tree.tail[:, place, None]


def slot_of(x: Tokens, tree: Tree, slot: int, last: Tensor) -> Tensor:
    """Computes a slot (Z, K, G V) of the final state; `last` (Z, G) decays initial ones."""
    state = torch.zeros_like(tree.nodes[0][:, 0])
    for b in old_slots(x, slot):
        assert x.state is not None
        state += x.state[b] * spread(last, x.state[b])
    if block_of(x, slot)[1] <= x.front:
        return state
    if 1 << slot < x.chunk:
        place, tokens, decay = part_of(x, tree, slot)
        values = x.v[:, place, tokens] * decay.exp()[..., None]
        return state + x.k[:, place, tokens].mT @ values.flatten(2)
    m, place, decay = node_of(x, tree, slot)
    node = tree.nodes[m][:, place]
    return state + node * spread(decay, node)


def differentiate(
    x: Tokens, grad: Tensor | None, grad_final: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns the gradients of q, k, v, g and level_scales, and of the initial state if given.

    `grad` (N, T, Hv, V) enters y, `grad_final` the final state. Every term of an output has the
    factor exp(G_i - G_j) of sums G of g, so the gradient of G_i is the sum over its terms as a
    query less the sum over its terms as a key.
    """
    tree = tree_of(x)
    incoming = (
        torch.zeros_like(x.v)
        if grad is None
        else arranged(grad.to(x.v.dtype), x.chunk, x.heads, x.groups, x.front)
    )
    dq, dk, dv, dscales = chunks.differentiate(x.q, x.k, x.v, x.g, x.scales, incoming)
    found = Gradients(dq, dk, dv, dscales, [torch.zeros_like(t) for t in tree.nodes], None)
    before = tree.inside + sums_before(tree.totals[0], 1)[:, :, None]
    total = before.new_zeros(1)
    if x.state is not None:
        found = found._replace(state=torch.zeros_like(x.state))
        if grad is not None:
            _initial_reads(x, before, incoming, found)
    if grad_final is not None:
        after, last = x.states(grad_final), before[:, -1, -1]
        for b in slots(x.position + x.steps):
            each = after[b] * slot_of(x, tree, b, last)
            total = total + each.unflatten(-1, x.v.shape[3:]).sum((1, 3))
            _final_slot(x, tree, b, last, after[b], found)
    for m in reversed(range(len(tree.nodes))):
        _level(x, tree, m, incoming, found)
    by = tree.behind.exp()[..., None]
    dnode = found.nodes[0]
    dk += (x.v * by).flatten(3) @ dnode.mT
    dv.addcmul_((x.k @ dnode).view(dv.shape), by)
    terms = (x.scales * dscales).sum(-1) - (x.v * dv).sum(-1)
    sums = terms.double().flatten(1, 2).flip(1).cumsum(1).flip(1).view(terms.shape)
    dg = sums.to(terms.dtype) + total.view(-1, 1, 1, total.shape[-1])
    keys = (x.restored(t[..., None, :]) for t in (dq, dk))
    state = None if found.state is None else x.states_restored(found.state)
    return (*keys, *(x.restored(t) for t in (dv, dg, dscales))), state


class Gradients(NamedTuple):
    """Gradients that the parts of a backward add to."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor
    nodes: list[Tensor]
    state: Tensor | None


def _read_backward(
    q: Tensor, state: Tensor, grad: Tensor, decay: Tensor, scale: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiates decay * scale * (q state) of rows q (.., r, K), grad (.., r, G, V), decay and
    scale (.., r, G) and states (.., K, G V): adds to dq; returns gradients of scale and states."""
    groups, factor = grad.shape[-2], decay * scale
    if groups == 1:
        back = (grad.squeeze(-2) @ state.mT)[..., None, :]
    else:
        each = state.unflatten(-1, grad.shape[-2:])
        back = torch.einsum("...rgv,...kgv->...rgk", grad, each)
    dscale = (back * q[..., None, :]).sum(-1) * decay
    dq.add_((back * factor[..., None]).sum(-2).view(dq.shape))
    return dscale, q.mT @ (grad * factor[..., None]).flatten(-2)


def _initial_reads(x: Tokens, before: Tensor, grad: Tensor, found: Gradients) -> None:
    """Adds the gradients of reads of the initial state."""
    assert x.state is not None and found.state is not None
    decay, q, rows = before.exp().flatten(1, 2), x.q.flatten(1, 2), grad.flatten(1, 2)
    for b in slots(x.position):
        index = rows_of(old_scales(x, b), x.scales)
        scale = x.scales.gather(-1, index).flatten(1)
        scale = scale.view(decay.shape)
        dscale, dstate = _read_backward(q, x.state[b], rows, decay, scale, found.q)
        found.scales.scatter_add_(-1, index, dscale.view(index.shape))
        found.state[b] += dstate


def _final_slot(
    x: Tokens, tree: Tree, slot: int, last: Tensor, grad: Tensor, found: Gradients
) -> None:
    """Adds the gradients of a slot of the final state for its gradient (Z, K, G V)."""
    for b in old_slots(x, slot):
        assert found.state is not None
        found.state[b] += grad * spread(last, grad)
    if block_of(x, slot)[1] <= x.front:
        return
    if 1 << slot < x.chunk:
        place, tokens, decay = part_of(x, tree, slot)
        by = decay.exp()[..., None]
        dv = found.v[:, place, tokens]
        found.k[:, place, tokens] += (x.v[:, place, tokens] * by).flatten(2) @ grad.mT
        dv += (x.k[:, place, tokens] @ grad).view(dv.shape) * by
        return
    m, place, decay = node_of(x, tree, slot)
    found.nodes[m][:, place] += grad * spread(decay, grad)


def _level(x: Tokens, tree: Tree, m: int, grad: Tensor, found: Gradients) -> None:
    """Adds the gradients of the nodes of 2^m chunks, and of the reads of these nodes."""
    node, count = found.nodes[m], x.q.shape[1]
    if m + 1 == len(tree.nodes):
        return
    above = found.nodes[m + 1]
    pairs = node.shape[1] // 2
    right = tree.totals[m][:, 1 : 2 * pairs : 2]
    node[:, : 2 * pairs : 2] += above[:, :pairs] * spread(right, above)
    node[:, 1 : 2 * pairs : 2] += above[:, :pairs]
    node[:, 2 * pairs :] += above[:, pairs:]
    column = x.level(m)
    decay = (tree.inside + tree.starts[m][:, :, None]).exp_()
    parts = (x.q, grad, decay, x.scales[..., column], found.q, found.scales[..., column])
    for each in zip(*(readers(t, count, m) for t in parts), strict=True):
        left = each[0][1]
        q, rows, by, scale = (t.flatten(2, 3) for t, _ in each[:4])
        dscale, dnode = _read_backward(q, tree.nodes[m][:, left], rows, by, scale, each[4][0])
        into = each[5][0]
        into += dscale.view(into.shape)
        node[:, left] += dnode
