"""The state of attention that forgets tokens by a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, widen
from omniattn.functional.masks import BoolMask, Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.modules.base.state import require_index, take
from omniattn.modules.caches.cache import (
    Attend,
    Cache,
    Reading,
    check_new,
    head_sizes,
    new_storage,
)
from omniattn.modules.caches.eviction import Eviction, Slots, evicted_of, require_plain

Rope = tuple[Tensor, Tensor]


class Kept(NamedTuple):
    """Tokens in slots: k (B, H, S, D), v (B, H, S, Dv), positions and weight (B, H, S)."""

    k: Tensor
    v: Tensor
    positions: Tensor
    weight: Tensor

    def take(self, slots: Tensor) -> Kept:
        """Selects the given slots (B, H, n)."""
        rows = slots[..., None]
        k, v = (t.gather(2, rows.expand(-1, -1, -1, t.shape[3])) for t in self[:2])
        return Kept(k, v, self.positions.gather(2, slots), self.weight.gather(2, slots))


class EvictingCache(Cache):
    """Keys and values of the tokens that a policy keeps, for each sequence and kv head.

    `attend` does a whole call, since the weights decide what is kept. A new token takes a free
    slot, so that slots are in no order. Memory follows the number of tokens kept, in steps of at
    most a factor of two.

    Args:
        eviction: the policy, or one for each kv head.
        batch, max_length, num_kv_heads, head_dim: sizes. max_length is the most tokens that are
            kept under a policy without a bound of its own.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: of the storage.

    Raises:
        TypeError: a dtype that is not floating point.
        ValueError: if a shape or an option does not fit, more than max_length tokens are kept,
            tokens are cropped that have chosen what is kept, or a state is that of another policy.
        RuntimeError: if something with a gradient is appended.

    Example:
        >>> from omniattn.modules import H2O
        >>> cache = EvictingCache(H2O(heavy=1, recent=2), 1, 16, 1, 4)
        >>> for _ in range(5):
        ...     y = cache.attend(*torch.ones(3, 1, 1, 1, 4))
        >>> cache.length, cache.evicted.tolist()
        (5, [[[False, True, True, False, False]]])
    """

    def __init__(
        self,
        eviction: Eviction | Sequence[Eviction],
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = [eviction] * num_kv_heads if isinstance(eviction, Eviction) else eviction
        self.policies = tuple(given)
        if len(self.policies) != num_kv_heads:
            raise ValueError(
                f"EvictingCache: eviction must be one policy for each of {num_kv_heads} kv heads, "
                f"got len(eviction)={len(self.policies)}"
            )
        if any(p.moves for p in self.policies) and len(set(self.policies)) > 1:
            raise ValueError(
                "EvictingCache: tokens can take new positions only under one policy of all heads, "
                f"got eviction={self.policies}"
            )
        self.max_length = max_length
        self.moves = any(p.moves for p in self.policies)
        bounds = [p.capacity for p in self.policies]
        #: The most tokens kept after a call, None if only max_length bounds them.
        self.capacity = None if None in bounds else max((n for n in bounds if n), default=0)
        shape, sizes = (batch, num_kv_heads, 0), (head_dim, v_head_dim)
        k, v = new_storage("EvictingCache", shape, sizes, device, dtype)
        positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self._kept = Kept(k, v, positions, widen(k.new_zeros(shape)))
        self._rope: Rope | None = None  # of the first positions, where tokens move
        self._used = 0  # slots of the views
        self._settled = 0  # the length after the last call that decided which tokens stay
        self.length = 0

    @property
    def _heads(self) -> list[tuple[Eviction, list[int] | slice]]:
        """Each policy and its kv heads."""
        found = dict.fromkeys(self.policies)
        if len(found) == 1:
            return [(self.policies[0], slice(None))]
        return [(p, [h for h, own in enumerate(self.policies) if own == p]) for p in found]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._kept, *(self._rope or ())))

    def _first(self, count: int) -> Kept:
        return Kept(*(t[:, :, :count] for t in self._kept))

    @property
    def positions(self) -> Tensor:
        """Position of the token in each slot of the views (B, Hkv, S) int64, -1: it is free."""
        return self._first(self._used).positions.clone()

    @property
    def evicted(self) -> Tensor:
        """True for tokens that are no longer kept, (B, Hkv, length) bool."""
        return evicted_of(self.positions, self.length)

    def views(self) -> tuple[Tensor, Tensor]:
        """All slots; `positions` says which of them are free."""
        k, v, *_ = self._first(self._used)
        return k.transpose(1, 2), v.transpose(1, 2)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "EvictingCache: append alone has no weights to choose by; a layer must call attend, as "
            f"Attention does, got k={tuple(k.shape)}"
        )

    def attention(
        self,
        k: Tensor,
        v: Tensor,
        attend: Attend,
        mask: Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
        *,
        rope: Rope | None = None,
        interleaved: bool = False,
        **options: Any,
    ) -> Reading:
        late = rope if self.moves else None
        attend = partial(self.attend, rope=late, interleaved=interleaved)
        return Reading(k, v, mask, score_mod, attend)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rope: Rope | None = None,
        interleaved: bool = False,
        backend: str | None = None,
        **options: Any,
    ) -> Tensor:
        """Stores n new tokens, attends causally to all that are kept, and evicts.

        Args:
            q: (B, n, Hq, D); k (B, n, Hkv, D); v (B, n, Hkv, Dv).
            k, v: see q.
            rope, interleaved: of the new tokens, where `moves`; see `functional.apply_rotary`.
            backend, options: of `functional.attention`, without masks and terms of positions.

        Returns:
            (B, n, Hq, Dv).
        """
        sizes = head_sizes(self._kept.k, self._kept.v)
        check_new("EvictingCache", k, v, self._kept.k.shape[0], *sizes)
        require_plain(options)
        several = self.moves and k.shape[1] > 1 and bool(self.evicted.any())
        size = 1 if several else max(k.shape[1], 1)
        outs = []
        for n in range(0, max(k.shape[1], 1), size):  # places depend on what was evicted before
            part = slice(n, n + size)
            rows = None if rope is None else (rope[0][..., part, :], rope[1][..., part, :])
            new = (q[:, part], k[:, part], v[:, part])
            outs.append(self._call(*new, rows, interleaved, options | {"backend": backend}))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope | None,
        interleaved: bool,
        options: dict[str, Any],
    ) -> Tensor:
        seen, new = self.length, k.shape[1]
        self._admit(new)
        tokens = self._with_new(k.transpose(1, 2), v.transpose(1, 2))
        keys, values = tokens.k.transpose(1, 2), tokens.v.transpose(1, 2)
        if rope is not None:
            turn = partial(
                functional.apply_rotary, interleaved=interleaved, backend=options["backend"]
            )
            q, keys = self._rotated(q, keys, tokens.positions, rope, turn)
        live, more = tokens.positions >= 0, options | {"causal": True}
        if not live.all():
            group = q.shape[2] // max(live.shape[1], 1)
            more["mask"] = BoolMask(live.repeat_interleave(group, 1)[:, :, None])
        out, lse = functional.attention(q, keys, values, return_lse=True, **more)
        more = {name: value for name, value in more.items() if name not in ("dropout_p", "seed")}
        tokens = tokens._replace(weight=self._weighed(tokens.weight, q, keys, lse, seen, more))
        keep = torch.empty_like(live)
        for policy, heads in self._heads:
            slots = Slots(tokens.positions[:, heads], tokens.weight[:, heads], seen, seen + new)
            keep[:, heads] = policy.keep(slots)
        self._store(tokens, keep)
        self.length = seen + new
        chooses = any(policy.observed(seen, new) > 0 for policy in self.policies)
        if chooses or not torch.equal(keep, live):
            self._settled = self.length
        return out

    def _admit(self, new: int) -> None:
        """Forgets the tokens that must leave before the new ones come."""
        kept = self._first(self._used)
        for policy, heads in self._heads:
            slots = Slots(kept.positions[:, heads], kept.weight[:, heads], self.length, self.length)
            left = policy.admits(slots, new)
            if left is not None and not torch.equal(left, slots.live):
                kept.positions[:, heads] = slots.positions.masked_fill(~left, -1)
                self._settled = self.length + new

    def _with_new(self, k: Tensor, v: Tensor) -> Kept:
        """All slots with the new tokens k (B, H, n, D), v; one takes a free slot of the storage."""
        batch, heads, new = k.shape[:3]
        kept = self._first(self._used)
        if new != 1 or self._used == 0:
            positions = torch.arange(self.length, self.length + new, device=k.device)
            own = positions.expand(batch, heads, -1)
            k, v = k.to(kept.k.dtype), v.to(kept.v.dtype)
            added = Kept(k, v, own, kept.weight.new_zeros(own.shape))
            if self._used == 0:
                return added
            return Kept(*(torch.cat(pair, 2) for pair in zip(kept, added, strict=True)))
        if not (kept.positions < 0).any(-1).all():
            self._reserve(self._used + 1, self._used)
            self._used += 1
            kept = self._first(self._used)
        slot = (kept.positions < 0).byte().argmax(-1, keepdim=True)
        for stored, row in ((kept.k, k), (kept.v, v)):
            index = slot[..., None].expand(-1, -1, -1, stored.shape[3])
            stored.scatter_(2, index, row.to(stored.dtype))
        kept.positions.scatter_(2, slot, self.length)
        kept.weight.scatter_(2, slot, 0)
        return kept

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        rope: Rope,
        turn: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:
        """New queries and the keys of all slots, at their places 0, 1, ... in the cache."""
        cos, sin = rope if self._rope is None else self._rope
        known = 0 if self._rope is None else cos.shape[-2]
        if known == self.length:  # the first tokens come with the rows of the first places
            if self._rope is not None:
                cos, sin = (torch.cat(pair, -2) for pair in zip(self._rope, rope, strict=True))
            last = None if self.capacity is None else self.capacity + 1
            self._rope = (cos[..., :last, :].clone(), sin[..., :last, :].clone())
        at = positions[0, 0]  # the same for all
        count = int((at >= 0).sum())
        if cos.shape[-2] < count:
            raise ValueError(
                f"EvictingCache: rope must have been given for the first {count} tokens, "
                f"got {cos.shape[-2]}"
            )
        place = (at.argsort().argsort() - (len(at) - count)).clamp(min=0)
        own = torch.arange(count - q.shape[1], count, device=at.device)
        q, _ = turn(q, None, *(t.index_select(-2, own) for t in (cos, sin)))
        k, _ = turn(k, None, *(t.index_select(-2, place) for t in (cos, sin)))
        return q, k

    def _weighed(
        self,
        weight: Tensor,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        seen: int,
        options: dict[str, Any],
    ) -> Tensor:
        """The sums after the call, of the tokens in all slots."""
        new, sums, found = q.shape[1], {}, weight
        for policy, heads in self._heads:
            rows = policy.observed(seen, new)
            if rows == 0:
                continue
            if found is weight:
                found = weight.clone()
            how = (rows, policy.decay)
            if how not in sums:
                last = lse[:, :, new - rows :]
                if policy.decay != 1:  # the weights of query i times decay^(n - 1 - i)
                    age = torch.arange(rows - 1, -1, -1, device=q.device, dtype=lse.dtype)
                    last = last - age * math.log(policy.decay)
                received = functional.attention_weights(
                    *(q[:, new - rows :], k, last), column_sums=True, group_sums=True, **options
                )
                sums[how] = received / (q.shape[2] // k.shape[2])
            found[:, heads] = weight[:, heads] * policy.decay**new + sums[how][:, heads]
        return found

    def _store(self, tokens: Kept, keep: Tensor) -> None:
        """Makes what `keep` says of these tokens the content."""
        positions = tokens.positions.masked_fill(~keep, -1)
        in_place = tokens.k.data_ptr() == self._kept.k.data_ptr() and self._used > 0
        count = int(keep.sum(-1).max()) if keep.numel() > 0 else 0
        if in_place and (self.capacity is not None or 2 * count >= self._used):
            kept = self._first(self._used)
            kept.positions.copy_(positions)
            kept.weight.copy_(tokens.weight)
            return
        order = (~keep).byte().argsort(dim=-1, stable=True)[..., :count]
        self._fill(tokens._replace(positions=positions).take(order))

    def _fill(self, tokens: Kept) -> None:
        """Makes these tokens the content."""
        count = tokens.k.shape[2]
        self._reserve(count, 0)
        self._used = count
        for stored, t in zip(self._first(count), tokens, strict=True):
            stored.copy_(t)

    def _reserve(self, count: int, used: int) -> None:
        """Storage of at least `count` slots, the first `used` of which stay as they are."""
        limit = self.max_length if self.capacity is None else self.capacity + 1
        if count > limit:
            raise ValueError(
                f"EvictingCache: at most max_length={limit} tokens can be kept, got {count}"
            )
        if 0 < used < count <= self._kept.k.shape[2]:
            return
        wanted, old = min(max(count, 2 * used), limit), self._first(used)
        self._kept = Kept(*(t.new_zeros(*t.shape[:2], wanted, *t.shape[3:]) for t in self._kept))
        self._kept.positions.fill_(-1)
        for stored, t in zip(self._first(used), old, strict=True):
            stored.copy_(t)

    def crop(self, length: int) -> None:
        require_int("EvictingCache", "length", length)
        if not 0 <= length <= self.length:
            raise ValueError(
                f"EvictingCache: length must be in 0..{self.length}, got length={length}"
            )
        if 0 < length < self._settled:
            raise ValueError(
                f"EvictingCache: tokens before position {self._settled} have chosen what is kept "
                f"and cannot be cropped, go on from a copy.deepcopy, got length={length}"
            )
        self.length = length
        positions = self._first(self._used).positions
        positions.masked_fill_(positions >= length, -1)
        if length == 0:
            self._used = self._settled = 0
        if self._rope is not None:
            cos, sin = self._rope
            self._rope = (cos[..., :length, :], sin[..., :length, :])

    def reorder(self, index: Tensor) -> None:
        require_index("EvictingCache", index, self._kept.k.shape[0])
        self._kept = Kept(*(t.index_select(0, index) for t in self._kept))
        if self._rope is not None and self._rope[0].dim() == 3:
            cos, sin = self._rope
            self._rope = (cos.index_select(0, index), sin.index_select(0, index))

    def state_dict(self) -> dict[str, Any]:
        k, v, positions, weight = self._first(self._used)
        return {
            "k": k.transpose(1, 2).clone(),
            "v": v.transpose(1, 2).clone(),
            "positions": positions.clone(),
            "weight": weight.clone(),
            "length": self.length,
            "settled": self._settled,
            "rope": None if self._rope is None else tuple(t.clone() for t in self._rope),
            "eviction": tuple(str(policy) for policy in self.policies),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = ("k", "v", "positions", "weight", "length", "settled", "rope", "eviction")
        found = take("EvictingCache", state, *names)
        k, v, positions, weight, length, settled, rope, eviction = found
        own = tuple(str(policy) for policy in self.policies)
        if tuple(eviction) != own:
            raise ValueError(
                f"EvictingCache: state must be that of the same policies {own}, "
                f"got eviction={tuple(eviction)}"
            )
        stored = self._kept
        sizes = head_sizes(stored.k, stored.v)
        check_new("EvictingCache", k, v, stored.k.shape[0], *sizes)
        fits = (*stored.k.shape[:2], k.shape[1])
        for name, t in (("positions", positions), ("weight", weight)):
            if t.shape != fits:
                raise ValueError(
                    f"EvictingCache: {name} must have shape {fits}, got {name}={tuple(t.shape)}"
                )
        self._fill(Kept(k.transpose(1, 2), v.transpose(1, 2), positions, weight))
        self.length, self._settled = length, settled
        self._rope = None if rope is None else (rope[0].clone(), rope[1].clone())
