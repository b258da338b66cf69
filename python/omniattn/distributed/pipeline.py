"""pipeline_parallel: a decoder whose layers are divided among ranks, as stages of a pipeline."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from omniattn.checks.arguments import require_int, shown
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.routers import Routers
from omniattn.modules import DecoderBlock
from omniattn.modules.attention._shared import KEYS_AND_VALUES
from omniattn.modules.base.jagged import Sequences, sequences_of
from omniattn.modules.caches.cache import Reading
from omniattn.modules.experts.auxiliary import AuxiliaryLoss

OP = "pipeline_parallel"


class Elsewhere(nn.Module):
    """Stands for a part of a decoder that another stage has, so that names stay the same."""


class _WithLoss(torch.autograd.Function):
    """Returns x; its backward also starts that of a loss, with gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


class DecoderStage(Decoder):
    """Decoder with some of the layers, made by `pipeline_parallel`.

    Attributes:
        own: numbers of these layers.
        is_first, is_last: True for the stages with the embedding, and with the head.
    """

    own: list[int]
    is_first: bool
    is_last: bool
    _parts: tuple[DecoderStage, ...] = ()  # of a rank with several stages
    _received: list[str]  # names that layers of this or later stages read from earlier stages
    _sent: list[str]
    _routers: Routers
    _layers_of: Counter[str]  # of all stages, as the next
    _experts: int

    def cut(self, own: Iterable[int], first: bool, last: bool) -> None:
        """Removes all layers but `own`, and the ends of the decoder that are not of this stage."""
        self.own, self.is_first, self.is_last = list(own), first, last
        self._layers_of, self._experts = self._kinds(), len(Routers(self).layers)
        blocks = list(self.layers)
        self._received = _shared_names(blocks, self.own[0])
        self._sent = _shared_names(blocks, self.own[-1] + 1)
        for n in range(len(self.layers)):
            if n not in self.own:
                self.layers[n] = Elsewhere()
        if not self.is_first:
            self.embed_positions = self.embed_norm = None
            if not (self.is_last and self.repeats):
                self.embed_tokens = Elsewhere()  # type: ignore[assignment]
        if not self.is_last:
            self.norm = Elsewhere()
            self.collapse = self.predictor = None
            self.lm_head = None if self.lm_head is None else Elsewhere()  # type: ignore[assignment]
        self._routers = Routers(self, sum_layers=True)

    def cut_stage(self, stage: int, stages: int) -> None:
        """Makes the decoder one of so many stages."""
        count = len(self.layers) // stages
        own = range(stage * count, (stage + 1) * count)
        self.cut(own, stage == 0, stage == stages - 1)

    def copied(self) -> DecoderStage:
        """Returns a decoder with the same layers, of which either can lose some."""
        other = copy.copy(self)
        for name in [name for name in vars(self) if name.startswith("_") and name != "_parts"]:
            setattr(other, name, copy.copy(getattr(self, name)))
        other.layers = nn.ModuleList(self.layers)
        return other

    def train(self, mode: bool = True) -> DecoderStage:
        for part in self._parts:
            part.training = mode
        super().train(mode)
        return self

    @property
    def blocks_with_experts(self) -> list[int]:
        """Numbers of the blocks of this stage's MoE layers; a predictor's follow the others."""
        found = [n for n in self.own for _ in Routers(self.layers[n]).layers]
        return found + [len(self.layers)] * (len(Routers(self).layers) - len(found))

    def _kinds(self) -> Counter[str]:
        """Returns the numbers of layers with losses of their own, by the names of these losses."""
        return Counter(m.auxiliary_name for m in self.modules() if isinstance(m, AuxiliaryLoss))

    @property
    def has_experts(self) -> bool:
        """True if a layer of any stage has experts."""
        return self._experts > 0

    @property
    def repeats(self) -> bool:
        """True if the last stage uses the embedding, too."""
        return self.lm_head is None or self.config.predictor is not None

    @property
    def repeated(self) -> list[Tensor]:
        """Parameters of this stage that another one counts as its own."""
        last = self.is_last and not self.is_first and self.repeats
        return [self.embed_tokens.weight] if last else []

    def further_losses(self) -> dict[str, float]:
        """As of a decoder; all stages have the same names, and the sums over them are those of the
        whole model."""
        kinds, found = self._kinds(), super().further_losses()
        shares = {name: kinds[name] / count for name, count in self._layers_of.items()}
        if self.config.predictor is not None:
            shares["mtp"] = 1.0
        return {name: share * found.get(name, 0.0) for name, share in sorted(shares.items())}

    def forward(  # type: ignore[override]
        self,
        *given: Tensor,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        share: Tensor | None = None,
    ) -> tuple[Tensor, ...] | Tensor:
        """Returns the output of the stage, that of the last one as of a decoder.

        Args:
            given: tokens (B, T) in the first stage, in others what the stage before returns.
            tokens: (B, T), for stages with an Engram, and for the last one if it predicts further
                tokens.
            targets: as of a decoder; read by the last stage.
            share: factor (1,) of the losses; None for 1.
        """
        factor = torch.ones(1) if share is None else share
        x, *rest = given
        _, sequences = sequences_of(OP, "tokens" if self.is_first else "x", x, dim=False)
        if x.is_nested:
            raise NotImplementedError(f"{OP}: tokens must be (B, T), got a nested tensor")
        positions = sequences.positions(x)
        shared: dict[str, Any] = {}
        if self.is_first:
            tokens = x
            x = self._embedded(tokens, positions)
        else:
            count = sum(map(_tensors_of, self._received))
            shared = _unpacked(self._received, rest[len(rest) - count :], sequences)
            rest = rest[: len(rest) - count]
        if tokens is not None:
            shared["tokens"] = tokens
        rope = None if self.rotary is None else self.rotary(positions)
        options = {"rope": rope, "mask": None, "shared": shared}
        layers = [self.layers[n] for n in self.own]
        x, residual = self._through(layers, x, rest[0] if rest else None, options, {}, None)
        if not self.is_last:
            x = self._with_losses(x, factor)
            stream = (x,) if residual is None else (x, residual)
            return (*stream, *_packed(self._sent, shared))
        y = self._normed(x, residual)
        if targets is None:
            return self._with_losses(self.head(y), factor)
        if self.predictor is not None and self.training:
            if tokens is None:
                raise ValueError(f"{OP}: tokens must be given to predict further ones, got None")
            self._predictor_loss = self._predict_further(y, tokens, targets, positions, None, None)
        loss = self.loss(y, targets)
        return self._with_losses(loss * factor.to(loss), factor)

    def _with_losses(self, x: Tensor, factor: Tensor) -> Tensor:
        """Returns x, whose backward includes that of the losses of this stage's layers."""
        if not (self.training and torch.is_grad_enabled()):
            return x
        routers = self._routers.loss() / max(1, self._experts)
        total = self.auxiliary_loss() + routers
        if not isinstance(total, Tensor) or not total.requires_grad:
            return x
        return cast(Tensor, _WithLoss.apply(x, total * factor.to(total)))


class _Stage(PipelineStage):
    """Sums the gradients of a weight that the first and the last stage have, after a step.

    `repeated` is the part of the rank that has this weight, if the backward of this stage is the
    last of the rank's, else None.
    """

    repeated: DecoderStage | None = None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.has_backward:
            return
        super().perform_reduce_grad(grad_scale_factor)
        if self.repeated is None or self.num_stages == 1:
            return
        grad = self.repeated.embed_tokens.weight.grad
        if grad is None:  # frozen
            return
        own: Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        assert self.group is not None
        peer = dist.get_world_size(self.group) - 1 if self.repeated.is_first else 0
        peer = dist.get_global_rank(self.group, peer)
        calls = [
            dist.P2POp(dist.isend, own.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        own.add_(other)


@overload
def pipeline_parallel(
    model: Decoder, mesh: DeviceMesh, *, stages_per_rank: None = None
) -> PipelineStage: ...


@overload
def pipeline_parallel(
    model: Decoder, mesh: DeviceMesh, *, stages_per_rank: int
) -> list[PipelineStage]: ...


def pipeline_parallel(
    model: Decoder, mesh: DeviceMesh, *, stages_per_rank: int | None = None
) -> PipelineStage | list[PipelineStage]:
    """Makes a decoder this rank's stages of a pipeline, in place, for the schedules of torch.

    Rank r of N keeps layers r L / N to (r + 1) L / N - 1; the first one has the embedding, the last
    one the final norm and the head. Names of parameters stay the same. Usage, on all ranks:

    ``schedule = Schedule1F1B(pipeline_parallel(model, mesh["pp"]), 4, loss_fn=lambda x, y: x)``
    ``schedule.step(tokens, targets=targets, target=targets)  # without tokens after the first``

    The last stage returns the loss of a microbatch, or logits without `targets`. Losses of routers
    and indexers, each at the stage of its layer, and of multi-token prediction are included in the
    gradients. The argument `share` of `step`, one number for each microbatch, multiplies its loss,
    as for microbatches with different numbers of targets and ``scale_grads=False``.

    With `stages_per_rank` V, as for ``ScheduleInterleaved1F1B``, the layers are divided among N V
    stages, of which rank r has r, r + N, r + 2 N and so on: a microbatch passes each rank V times,
    so that ranks wait for 1 / V of the time at the ends of a step.

    A weight that embedding and head share is at the first and the last stage. At the end of `step`
    they exchange its gradients, and both get the sum. Call `step` once for each optimizer step, and
    leave out the last stage's copy in the norm of all gradients.

    Args:
        model: a decoder of DecoderBlocks, equal on all ranks. Split it by `expert_parallel` and
            `tensor_parallel` before this, and by `fully_shard` after it (each `submod`).
        mesh: mesh of one dimension with N ranks, such as ``mesh["pp"]``. N times the stages of a
            rank divides the layers.
        stages_per_rank: number of stages of each rank in a list, with at least two ranks if it is
            above 1; None for one stage, without a list.

    Returns:
        The stage or stages. The `submod` of a single one is the model. Each of several has a
        decoder with its layers, and the model holds all parameters of the rank.

    Raises:
        TypeError: the mesh is not a DeviceMesh, or the model not a Decoder.
        ValueError: the mesh has several dimensions, or the stages do not divide the layers. Nothing
            has been changed then.
        NotImplementedError: blocks share weights, as in Zamba.

    Note:
        Stages exchange the residual stream as the blocks do, as its sum so far and the last output,
        (B, T, dim) each. Values, or keys and values, of earlier layers that later ones read
        (`value_residual`, `shared_kv`, RWKV-7) pass through all stages in between.

    Reference:
        Huang et al., GPipe, 2018, arXiv:1811.06965; Narayanan et al., PipeDream (1F1B), 2018,
        arXiv:1806.03377; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters Using Megatron-LM" (interleaved 1F1B), 2021, arXiv:2104.04473.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{OP}: mesh must be a DeviceMesh, got mesh={shown(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"{OP}: mesh must have one dimension, as mesh['pp'], got mesh={mesh}")
    if not isinstance(model, Decoder):
        raise TypeError(f"{OP}: model must be a Decoder, got {type(model).__name__}")
    ranks, rank, each = mesh.size(), mesh.get_local_rank(), stages_per_rank
    if each is None:
        each = 1
    require_int(OP, "stages_per_rank", each, least=1)
    if each > 1 and ranks == 1:
        raise ValueError(
            f"{OP}: stages_per_rank must be 1 with one rank, got stages_per_rank={each}"
        )
    if not len(model.layers) or len(model.layers) % (ranks * each):
        more = "" if each == 1 else f", stages_per_rank={each}"
        raise ValueError(
            f"{OP}: the stages must divide the layers, got num_layers={len(model.layers)}, "
            f"ranks={ranks}{more}"
        )
    for block in model.layers:
        if not isinstance(block, DecoderBlock):
            raise NotImplementedError(
                f"{OP}: layers of a decoder must be DecoderBlocks, got {type(block).__name__}"
            )
    kind = type(model)
    model.__class__ = type(f"{kind.__name__}Stage", (DecoderStage, kind), {})
    whole = cast(DecoderStage, model)
    numbers = range(rank, ranks * each, ranks)
    parts = [whole] if each == 1 else [whole.copied() for _ in numbers]
    for stage, part in zip(numbers, parts, strict=True):
        part.cut_stage(stage, ranks * each)
    if each > 1:
        whole.cut([n for part in parts for n in part.own], rank == 0, rank == ranks - 1)
        whole._parts = tuple(parts)
    device = next(model.parameters()).device
    stages: list[PipelineStage] = [
        _Stage(part, stage, ranks * each, device, group=mesh.get_group())
        for stage, part in zip(numbers, parts, strict=True)
    ]
    ends = [part for part in parts if part.repeats and (part.is_first or part.is_last)]
    cast(_Stage, stages[0]).repeated = ends[0] if ends else None
    return stages[0] if stages_per_rank is None else stages


def same_stages(stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """Returns other stages of the same model, for a schedule of batches of another shape."""
    return [_Stage(s.submod, s.stage_index, s.num_stages, s.device, group=s.group) for s in stages]


def _shared_names(blocks: Sequence[Any], first: int) -> list[str]:
    """Returns the names that blocks from `first` on read from blocks before it."""
    before = {name for block in blocks[:first] for name in block.mixer.publishes}
    found: list[str] = []
    for block in blocks[first:]:
        found += [name for name in block.mixer.reads if name in before and name not in found]
        before -= set(block.mixer.publishes)
    return found


def _tensors_of(name: str) -> int:
    """Returns the number of tensors of what layers publish under a name."""
    return 2 if name == KEYS_AND_VALUES else 1


def _packed(names: list[str], shared: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that the next stage gets."""
    found: list[Tensor] = []
    for name in names:
        value = shared[name]
        found += [value.k, value.v] if isinstance(value, Reading) else [value]
    # A stage that hands on what it received returns no leaf of autograd.
    return [t.view_as(t) for t in found]


def _unpacked(names: list[str], given: list[Tensor], sequences: Sequences) -> dict[str, Any]:
    """Returns what `_packed` made tensors of; stages have no masks and scores."""
    tensors = iter(given)
    shared: dict[str, Any] = {}
    for name in names:
        if name == KEYS_AND_VALUES:
            shared[name] = Reading(next(tensors), next(tensors), None, None, sequences.attention())
        else:
            shared[name] = next(tensors)
    return shared
