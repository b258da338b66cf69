"""fla's context parallelism: packed tokens whose row is split over ranks, `fla.ops.cp`.

omniattn.distributed is imported in calls that need it, as it takes longer than the rest of compat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from omniattn.checks.arguments import require_int, require_integers, shown
from omniattn.functional.recurrences._common import require_boundaries

if TYPE_CHECKING:
    from omniattn.distributed.layout import Packed


@dataclass
class FLACPContext:
    """A rank's part of a packed row, see `build_cp_context`.

    Args:
        group: ranks that have parts of the row, or None if there is one.
        cu_seqlens: (S + 1,) int32, boundaries of the S sequences within the part.
        cu_seqlens_cpu: the same on the CPU.
        is_last_rank, is_first_rank: True if the last sequence ends in this part, and if the first
            one begins in it.
        pre_num_ranks, post_num_ranks: number of ranks before this one that have tokens of its first
            sequence, and after it that have some of its last one.
        conv1d_kernel_size: taps of the convolutions, None if not known.
        pre_num_conv_tokens: number of tokens of the first sequence on earlier ranks.
    """

    group: dist.ProcessGroup | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None

    def copy_for_backward(self) -> FLACPContext:
        """Returns a copy with copies of the tensors."""
        tensors = (self.cu_seqlens, self.cu_seqlens_cpu)
        gpu, cpu = (None if t is None else t.clone() for t in tensors)
        return replace(self, cu_seqlens=gpu, cu_seqlens_cpu=cpu)

    @property
    def num_seqs(self) -> int:
        """Number of sequences that have tokens on this rank."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


def build_cp_context(
    cu_seqlens: Tensor,
    group: dist.ProcessGroup,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> FLACPContext:
    """Returns this rank's part of a packed row of which N ranks have T / N tokens each, in order.

    Functions with a `cp_context` then take the part's tokens (1, T / N, ...) and return its part
    of what one process would compute from all. Every rank of the group calls them.

    `initial_state` and final states, which fla refuses there, have a row for each of the part's
    `num_seqs` sequences. The first row of `initial_state` is not read if that sequence began on
    another rank; the last final state of a sequence that goes on is the one that was passed on.

    Args:
        cu_seqlens: (S + 1,) int, boundaries in the whole row, equal on all ranks; empty sequences
            are left out of the parts.
        group: the ranks.
        conv1d_kernel_size: number of taps that convolutions must have; None for any.
        cu_seqlens_cpu: cu_seqlens on the CPU, which saves a copy.

    Raises:
        TypeError: group is not a process group.
        ValueError: N is not a divisor of T, or cu_seqlens are no boundaries.

    Reference:
        fla-org/flash-linear-attention at bc3b101dcb71, fla/ops/cp/context.py.
    """
    op = "build_cp_context"
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a ProcessGroup, got group={shown(group)}")
    if conv1d_kernel_size is not None:
        require_int(op, "conv1d_kernel_size", conv1d_kernel_size, 1)
    require_integers(op, "cu_seqlens", cu_seqlens)
    edges = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if cu_seqlens.ndim != 1 or edges != sorted(edges) or edges[:1] != [0]:
        raise ValueError(f"{op}: cu_seqlens must grow from 0, got cu_seqlens={edges}")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if edges[-1] == 0 or edges[-1] % ranks:
        raise ValueError(
            f"{op}: cu_seqlens[-1] must be a positive multiple of the number of ranks, "
            f"got cu_seqlens[-1]={edges[-1]}, {ranks} ranks"
        )
    from omniattn.distributed.layout import Packed

    length = edges[-1] // ranks
    start = rank * length
    part = Packed.of(edges, start, length)
    before = max(edge for edge in edges if edge <= start)
    after = min(edge for edge in edges if edge >= start + length)
    own = torch.tensor(part.boundaries, dtype=torch.int32)
    return FLACPContext(
        group,
        own.to(cu_seqlens.device),
        own,
        is_last_rank=not part.goes_on,
        pre_num_ranks=rank - before // length,
        is_first_rank=not part.continues,
        post_num_ranks=(after - 1) // length - rank,
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=start - before,
    )


def boundaries_of_rank(op: str, context: Any, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the boundaries of the part; `cu_seqlens` must be None or equal."""
    if not isinstance(context, FLACPContext):
        raise TypeError(
            f"{op}: cp_context must be a result of build_cp_context, "
            f"got cp_context={shown(context)}"
        )
    own = context.cu_seqlens
    if own is None:
        raise ValueError(f"{op}: cp_context must have cu_seqlens, got cp_context.cu_seqlens=None")
    if cu_seqlens is not None and cu_seqlens is not own and cu_seqlens.tolist() != own.tolist():
        raise ValueError(
            f"{op}: cu_seqlens must be None or those of cp_context, {own.tolist()}, "
            f"got cu_seqlens={cu_seqlens.tolist()}"
        )
    return own


@torch.compiler.disable
def call_on_ranks(
    context: FLACPContext,
    call: Callable[..., tuple[Tensor, Any]],
    tensors: tuple[Tensor, ...],
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls a recurrence that starts from states of other ranks."""
    if context.group is None:
        return call(*tensors, **options)
    from omniattn.distributed.context import Part

    with Part(context.group, _part(context)).active():
        return call(*tensors, **options)


@torch.compiler.disable
def rows_of_ranks(
    op: str, context: FLACPContext, x: Tensor, count: int, initial: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns x (1, T, C) and the `count` rows (S, C, count) before its sequences, from other ranks
    and from `initial`; None for zeros."""
    assert context.cu_seqlens is not None
    require_boundaries(op, context.cu_seqlens, x, "x")
    if context.group is None:
        return x, initial
    from omniattn.distributed.layout import Layout
    from omniattn.distributed.states import rows_before

    if x.shape[1] < count:
        raise ValueError(
            f"{op}: with cp_context a rank must have {count} tokens, got x.shape={tuple(x.shape)}"
        )
    layout = Layout(context.group, "contiguous")
    given = None if initial is None else initial.to(x.dtype)
    (x,), (state,) = rows_before(layout, [x], [_part(context)], count, given)
    return x, given if state is None else state


def _part(context: FLACPContext) -> Packed:
    from omniattn.distributed.layout import Packed

    edges = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
    assert edges is not None
    return Packed(tuple(edges.tolist()), not context.is_first_rank, not context.is_last_rank)
