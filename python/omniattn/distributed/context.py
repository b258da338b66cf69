"""context_parallel: calls and models whose tokens are split over the ranks of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from omniattn.checks.arguments import require_choice, shown
from omniattn.checks.ranks import ACTIVE, Region
from omniattn.distributed.attention import split_attention
from omniattn.distributed.layout import Layout, Order, Packed
from omniattn.distributed.messages import Gather, Halo, Prompt
from omniattn.distributed.states import PASSED, States
from omniattn.modules.base.mixer import Mixer
from omniattn.modules.blocks.mtp import MultiTokenPredictor
from omniattn.ops.dispatch.functions import derivative_levels

__all__ = ["context_parallel", "context_parallel_unshard"]

#: Functions that mix tokens only by attention, and by ops that pass their states.
FUNCTIONS = frozenset(
    (
        *("attention", "forgetting_attention", "hub_spoke_attention", "detsa_attention"),
        *("rwkv_quadratic", "rwkv_recurrent"),
        *("linear_attention", "gated_linear_attention", "retention", "rwkv6", "rwkv7"),
        *(
            "gated_delta_product",
            "delta_rule",
            "gated_delta_rule",
            "kimi_delta_attention",
            "dplr_delta_rule",
        ),
        *("gated_delta_rule_2", "comba", "gated_oja_rule", "preconditioned_delta_rule"),
        *("gated_slot_attention", "abc_attention", "lightnet_attention", "cyclic_flow_attention"),
        *("mlstm", "slstm", "rwkv4", "linear_scan", "causal_conv1d", "dynamic_conv1d"),
        *("selective_scan", "ssd", "longhorn_scan", "mamba3"),
    )
)
#: Layers that mix tokens only by these functions.
LAYERS = frozenset(
    (
        *("Attention", "MultiHeadLatentAttention", "DifferentialAttention", "DeltaAttention"),
        *("HubSpokeAttention", "DeterministicSparseAttention", "ReBased", "LightNet"),
        *("GatedDeltaNet2", "Comba", "PrecondGatedDeltaNet", "PrecondKDA", "Rodimus"),
        *("GatedSlotAttention", "Raven", "ABCAttention", "CyclicFlowAttention"),
        *("LinearAttention", "GatedLinearAttention", "MultiScaleRetention"),
        *("LightningAttention", "HGRN", "HGRN2", "DeltaNet", "GatedDeltaNet"),
        *("KimiDeltaAttention", "GatedDeltaProduct", "Longhorn", "Mamba", "Mamba2", "Mamba3"),
        *("MLSTM", "SLSTM"),
        *("RWKV4TimeMix", "RWKV5TimeMix", "RWKV6TimeMix", "RWKV7TimeMix", "RWKVRecurrent"),
    )
)
#: Ops of a call that read tokens one by one.
TOKEN_WISE = frozenset(
    (
        *("norm", "add_norm", "linear", "gated_norm", "moe", "norm_rope", "rope", "glu"),
        *("glu_mlp", "dropout", "cross_entropy", "jsd", "linear_cross_entropy", "linear_jsd"),
    )
)


class ContextParallel(Region):
    """Result of `context_parallel`: the calls within it, and the parts of tensors."""

    def __init__(self, layout: Layout, method: str, cu_seqlens: Tensor | None) -> None:
        self.layout, self.method = layout, method
        self.offsets = None if cu_seqlens is None else [int(n) for n in cu_seqlens]
        self.states = States(layout, self.offsets)
        self.documents: Tensor | None = None
        if cu_seqlens is not None:
            numbers = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
            self.documents = numbers.repeat_interleave(cu_seqlens.diff())

    def shard(self, t: Tensor, dim: int = 1) -> Tensor:
        """Returns a copy of this rank's part of t, whose `dim` has all tokens.

        Raises:
            ValueError: the tokens cannot be divided among the chunks.
        """
        _require_divisible(self.layout, t, dim)
        return self.layout.shard(t, dim)

    def unshard(self, t: Tensor, dim: int = 1) -> Tensor:
        """Returns all tokens of t, whose `dim` has those of this rank; gradients go back."""
        parts = Gather.apply(t.movedim(dim, 0), self.layout).flatten(0, 1)
        return self.layout.natural(parts, 0).movedim(0, dim)

    def require(self, op: str) -> None:
        if op not in FUNCTIONS:
            raise NotImplementedError(
                f"{op}: has no form for tokens that context_parallel splits over ranks; those that "
                f"do are {', '.join(sorted(FUNCTIONS))}"
            )

    def positions(self, count: int, device: torch.device) -> Tensor:
        positions = self.layout.positions(count, device)
        if self.offsets is None:
            return positions
        starts = torch.tensor(self.offsets[:-1], device=device)
        assert self.documents is not None
        return positions - starts[self.documents.to(device)[positions]]

    def length(self, count: int) -> int:
        return self.layout.ranks * count

    def before(self, t: Tensor) -> Tensor:
        length = self.layout.length(t)
        chunks = torch.stack(t.split(length, 1))
        halos = Halo.apply(chunks[:, :, -1:], self.layout, 1)
        earlier = torch.cat((halos, chunks[:, :, :-1]), 2).unbind(0)
        shifted = torch.cat(earlier, 1)
        first = self.positions(t.shape[1], t.device) == 0
        return shifted.masked_fill(first.view(1, -1, *[1] * (t.dim() - 2)), 0.0)

    def after(self, t: Tensor) -> Tensor:
        chunks = torch.stack(t.split(self.layout.length(t), 1))
        halos = Halo.apply(chunks[:, :, :1], self.layout, -1)
        shifted = torch.cat(torch.cat((chunks[:, :, 1:], halos), 2).unbind(0), 1)
        if self.offsets is None:
            return shifted
        following = self.layout.positions(t.shape[1], t.device) + 1
        last = torch.isin(following, torch.tensor(self.offsets, device=t.device))
        return shifted.masked_fill(last.view(1, -1, *[1] * (t.dim() - 2)), 0.0)

    def sums(self, t: Tensor) -> Tensor:
        layout = self.layout
        length = layout.length(t)
        # In a batch each chunk is a part of one sequence.
        offsets = self.offsets or [0, length * layout.count]
        packs = [Packed.of(offsets, c * length, length) for c in range(layout.count)]
        found = [
            [part[:, a:b].cumsum(1) for a, b in pairwise(packs[own].boundaries)]
            for own, part in zip(layout.own, t.split(length, 1), strict=True)
        ]
        last = torch.stack([parts[-1][:, -1] for parts in found])
        every = layout.by_chunk(Gather.apply(last, layout))
        nothing = every[:0].sum(0)  # has a graph, so that all ranks join the backward
        before, total = [], nothing
        for pack, one in zip(packs, every.unbind(0), strict=True):
            before.append(total if pack.continues else nothing)
            total = one + before[-1] if len(pack.boundaries) == 2 else one
        for own, parts in zip(layout.own, found, strict=True):
            parts[0] = parts[0] + before[own][:, None]
        return torch.cat([part for parts in found for part in parts], 1)

    @contextlib.contextmanager
    def several(self, steps: int) -> Iterator[None]:
        self.states.steps = steps
        try:
            yield
        finally:
            self.states.steps = 1

    @torch.no_grad()
    def first(self, t: Tensor) -> Tensor | None:
        if self.documents is None or self.offsets is None:
            return None
        count, device = t.shape[1], t.device
        documents = self.documents.to(device)[self.layout.positions(count, device)]
        starts = self.positions(count, device) == 0
        rows = t.new_zeros(len(self.offsets) - 1, *t.shape[2:])
        rows[documents[starts]] = t[0, starts]
        dist.all_reduce(rows, group=self.layout.group)  # each row is that of one rank
        return rows[documents][None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return split_attention(self.layout, self.method, self.documents, q, k, v, **options)

    def run(self, op: Any, args: tuple[Any, ...]) -> Any:
        if op.name in PASSED:
            if derivative_levels() or forward_ad._current_level >= 0:
                raise NotImplementedError(
                    f"{op.name}: context_parallel has no derivatives of torch.func and no forward "
                    "mode; call backward or torch.autograd.grad"
                )
            return self.states.run(op, args)
        if op.name not in TOKEN_WISE:
            self.require(op.name)
        return op.alone(*args)

    def check_layer(self, layer: nn.Module, _: Any) -> None:
        """Raises for layers of this package that mix tokens otherwise than by split functions."""
        name = type(layer).__name__
        if isinstance(layer, MultiTokenPredictor) or (
            isinstance(layer, Mixer) and name not in LAYERS
        ):
            raise NotImplementedError(
                f"{name}: has no form for tokens that context_parallel splits over ranks; those "
                f"that do are {', '.join(sorted(LAYERS))}"
            )


class Part(ContextParallel):
    """Calls whose boundaries and states are those of this rank's part of a packed row.

    Has no end at which all was sent, since backward passes come after it.
    """

    def __init__(self, group: dist.ProcessGroup, part: Packed) -> None:
        super().__init__(Layout(group, "contiguous"), "ring", None)
        self.part, self.states.outbox = part, Prompt()

    def run(self, op: Any, args: tuple[Any, ...]) -> Any:
        return self.states.run_part(op, args, self.part) if op.name in PASSED else op.alone(*args)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if ACTIVE.region is not None:
            raise RuntimeError("cp_context must be None within context_parallel")
        ACTIVE.region = self
        try:
            yield
        finally:
            ACTIVE.region = None


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    method: Literal["ring", "all_to_all"] = "ring",
    order: Order = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Iterator[ContextParallel]:
    """Splits the tokens of each sequence over the ranks of a mesh, in the manner of torch's
    `torch.distributed.tensor.experimental.context_parallel`.

    Within it, this package's functions and layers take this rank's tokens (B, T / N, ...) and give
    its part of what one process would compute from all: attention gets keys from the other ranks,
    recurrences, scans and convolutions get states and last tokens of the rank before, rotary and
    other positions are those of the whole sequence. Backward passes belong into it, too. All ranks
    make the same calls. Gradients of weights are those of the rank's tokens, as in data
    parallelism: sum them (FSDP2 and DDP over this mesh or one that contains it average).

    Args:
        mesh: mesh of one dimension, with N ranks.
        buffers: tensors with all tokens, equal on all ranks, such as tokens and targets. Within the
            context each has this rank's part; its storage is restored after it.
        buffer_seq_dims: for each of them the dimension of the tokens.
        no_restore_buffers: those of `buffers` that keep this rank's part.
        method: how attention gets keys: "ring" passes them from rank to rank while it computes, for
            any number of heads; "all_to_all" (Ulysses) gives each rank all tokens of some heads, of
            which N must be a divisor.
        order: "zigzag" gives a rank two chunks, one from each end, so that causal attention has the
            same work on all; T must be a multiple of 2 N. "contiguous" gives it one, which lets
            delta rules and scans of several layers run at the same time on all ranks.
        cu_seqlens: boundaries (S + 1,) of the sequences of packed tokens, B = 1, in the whole row.
            A sequence may be on several ranks. None for a batch of sequences.

    Yields:
        an object with `shard(t, dim)`, `unshard(t, dim)` and `positions(count, device)`.

    Raises:
        ValueError: the mesh has several dimensions, or tokens that cannot be divided.
        NotImplementedError: (within) a function or layer that mixes tokens in another way.

    Note:
        Attention takes causal, windows, masks and biases of the whole sequence (positions count
        from its start), sinks, slopes, tables, score_mod, and in the ring dropout, whose bits are
        those of one process with the first rank's seed. Results do not depend on timing. With
        `state=` or caches, calls raise.

    Reference:
        Liu et al., Ring Attention with Blockwise Transformers, 2023, arXiv:2310.01889; Jacobs et
        al., DeepSpeed Ulysses, 2023, arXiv:2309.14509; Sun et al., Linear Attention Sequence
        Parallelism, 2024, arXiv:2404.02882.
    """
    op = "context_parallel"
    require_choice(op, "method", method, ("ring", "all_to_all"))
    require_choice(op, "order", order, ("zigzag", "contiguous"))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{op}: mesh must be a DeviceMesh, got mesh={shown(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"{op}: mesh must have one dimension, as mesh['cp'], got mesh={mesh}")
    split, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(split) != len(dims):
        raise ValueError(
            f"{op}: buffers and buffer_seq_dims must have the same length, "
            f"got len(buffers)={len(split)}, len(buffer_seq_dims)={len(dims)}"
        )
    if ACTIVE.region is not None:
        raise RuntimeError(f"{op}: must not be within another {op}")
    layout = Layout(mesh.get_group(), order)
    for t, dim in zip(split, dims, strict=True):
        if t.requires_grad:
            raise ValueError(f"{op}: buffers must not need gradients; use shard of the context")
        _require_divisible(layout, t, dim)
    whole = [t.data for t in split]
    region = ContextParallel(layout, method, cu_seqlens)
    hook = register_module_forward_pre_hook(region.check_layer)
    kept = {id(t) for t in no_restore_buffers or ()}
    try:
        for t, dim in zip(split, dims, strict=True):
            t.data = layout.shard(t.data, dim)
        ACTIVE.region = region
        with torch.compiler.set_stance("force_eager"):  # graphs know nothing of other ranks
            yield region
        region.states.outbox.flush()
    finally:
        ACTIVE.region = None
        hook.remove()
        for t, data in zip(split, whole, strict=True):
            if id(t) not in kept:
                t.data = data


def _require_divisible(layout: Layout, t: Tensor, dim: int) -> None:
    if t.shape[dim] % layout.count:
        raise ValueError(
            f"context_parallel: in {layout.order} order the tokens must be a multiple of "
            f"{layout.count} for {layout.ranks} ranks, got t.shape={tuple(t.shape)}, dim={dim}"
        )


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    *,
    order: Order = "zigzag",
) -> list[Tensor]:
    """Returns all tokens of tensors that have this rank's part, such as outputs.

    Args:
        mesh, order: as in `context_parallel`.
        buffers: tensors with this rank's tokens in the dimensions `seq_dims`.
        seq_dims: one dimension for each of `buffers`.
    """
    region = ContextParallel(Layout(mesh.get_group(), order), "ring", None)
    return [region.unshard(t, dim) for t, dim in zip(buffers, seq_dims, strict=True)]
