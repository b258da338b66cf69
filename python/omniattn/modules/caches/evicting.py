"""Cache that evicts tokens by a policy."""

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
    """Keys and values of the tokens that a policy keeps, per sequence and kv head.

    `attend` computes a whole attention call, since its weights determine the kept tokens. A new
    token takes a free slot, so slots are unordered. Memory grows with the number of kept tokens, by
    at most a factor of two at a time.

    Args:
        eviction: the policy, or one per kv head.
        batch, max_length, num_kv_heads, head_dim: sizes. max_length is the largest number of kept
            tokens for a policy without its own capacity.
        v_head_dim: head size of the values, default `head_dim`.
        device, dtype: device and dtype of the storage.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: a shape or an option is invalid, more than max_length tokens are kept, cropped
            tokens have already caused evictions, or a loaded state has another policy.
        RuntimeError: an appended tensor requires a gradient.

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
                "EvictingCache: a policy that moves tokens must be the same for all heads, "
                f"got eviction={self.policies}"
            )
        self.max_length = max_length
        self.moves = any(p.moves for p in self.policies)
        bounds = [p.capacity for p in self.policies]
        #: Largest number of kept tokens after a call, None if only max_length bounds it.
        self.capacity = None if None in bounds else max((n for n in bounds if n), default=0)
        shape, sizes = (batch, num_kv_heads, 0), (head_dim, v_head_dim)
        k, v = new_storage("EvictingCache", shape, sizes, device, dtype)
        positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self._kept = Kept(k, v, positions, widen(k.new_zeros(shape)))
        self._rope: Rope | None = None  # tables of the first positions, if tokens move
        self._used = 0  # number of slots in the views
        self._settled = 0  # length after the last call that used weights or evicted tokens
        self.length = 0

    @property
    def _heads(self) -> list[tuple[Eviction, list[int] | slice]]:
        """Distinct policies, each with its kv heads."""
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
        """Position of the token in each slot of the views (B, Hkv, S) int64, -1 in free slots."""
        return self._first(self._used).positions.clone()

    @property
    def evicted(self) -> Tensor:
        """Mask (B, Hkv, length) bool, True for evicted tokens."""
        return evicted_of(self.positions, self.length)

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns all slots, including free ones, which have position -1."""
        k, v, *_ = self._first(self._used)
        return k.transpose(1, 2), v.transpose(1, 2)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "EvictingCache: append has no attention weights to evict by; a layer must call attend, "
            f"as Attention does, got k={tuple(k.shape)}"
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
        """Stores n new tokens, attends causally to all kept tokens, and evicts.

        Args:
            q: queries (B, n, Hq, D).
            k, v: keys (B, n, Hkv, D) and values (B, n, Hkv, Dv).
            rope, interleaved: rotation of the new tokens, if `moves`; see
                `functional.apply_rotary`.
            backend, options: options of `functional.attention`, without masks and positional score
                terms.

        Returns:
            (B, n, Hq, Dv).
        """
        sizes = head_sizes(self._kept.k, self._kept.v)
        check_new("EvictingCache", k, v, self._kept.k.shape[0], *sizes)
        require_plain(options)
        several = self.moves and k.shape[1] > 1 and bool(self.evicted.any())
        size = 1 if several else max(k.shape[1], 1)
        outs = []
        for n in range(0, max(k.shape[1], 1), size):  # indices depend on earlier evictions
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
        """Evicts the tokens that must leave before the new ones are stored."""
        kept = self._first(self._used)
        for policy, heads in self._heads:
            slots = Slots(kept.positions[:, heads], kept.weight[:, heads], self.length, self.length)
            left = policy.admits(slots, new)
            if left is not None and not torch.equal(left, slots.live):
                kept.positions[:, heads] = slots.positions.masked_fill(~left, -1)
                self._settled = self.length + new

    def _with_new(self, k: Tensor, v: Tensor) -> Kept:
        """Returns all slots with the new tokens k (B, H, n, D) and v.

        A single token is written to a free slot of the storage; several are concatenated.
        """
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
        """Rotates new queries and the keys of all slots by their indices 0, 1, ... in the cache."""
        cos, sin = rope if self._rope is None else self._rope
        known = 0 if self._rope is None else cos.shape[-2]
        if known == self.length:  # the first tokens' positions are the first indices
            if self._rope is not None:
                cos, sin = (torch.cat(pair, -2) for pair in zip(self._rope, rope, strict=True))
            last = None if self.capacity is None else self.capacity + 1
            self._rope = (cos[..., :last, :].clone(), sin[..., :last, :].clone())
        at = positions[0, 0]  # equal for all sequences and heads
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
        """Returns the accumulated attention weight of each slot's token after the call."""
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
                if policy.decay != 1:  # multiplies query i's weights by decay^(n - 1 - i)
                    age = torch.arange(rows - 1, -1, -1, device=q.device, dtype=lse.dtype)
                    last = last - age * math.log(policy.decay)
                received = functional.attention_weights(
                    *(q[:, new - rows :], k, last), column_sums=True, group_sums=True, **options
                )
                sums[how] = received / (q.shape[2] // k.shape[2])
            found[:, heads] = weight[:, heads] * policy.decay**new + sums[how][:, heads]
        return found

    def _store(self, tokens: Kept, keep: Tensor) -> None:
        """Replaces the content by the tokens that `keep` selects."""
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
        """Replaces the content by these tokens."""
        count = tokens.k.shape[2]
        self._reserve(count, 0)
        self._used = count
        for stored, t in zip(self._first(count), tokens, strict=True):
            stored.copy_(t)

    def _reserve(self, count: int, used: int) -> None:
        """Provides storage of at least `count` slots; preserves the first `used`."""
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
                f"EvictingCache: tokens before position {self._settled} have determined which "
                "tokens are kept and cannot be cropped; continue from a copy.deepcopy, got "
                f"length={length}"
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
