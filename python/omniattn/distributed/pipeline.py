"""pipeline_parallel: a decoder whose layers are divided among ranks, as stages of a pipeline."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from omniattn.checks.arguments import shown
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.routers import Routers
from omniattn.modules import Attention, DecoderBlock
from omniattn.modules.base.jagged import sequences_of
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

    own: range
    is_first: bool
    is_last: bool
    _routers: Routers
    _layers_of: Counter[str]  # of all stages, as the next
    _experts: int

    def cut(self, stage: int, stages: int) -> None:
        """Removes the parts of other stages."""
        count = len(self.layers) // stages
        self.own = range(stage * count, (stage + 1) * count)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self._layers_of, self._experts = self._kinds(), len(Routers(self).layers)
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
        shared: dict[str, Tensor] = {}
        if self.is_first:
            tokens = x
            x = self._embedded(tokens, positions)
        if tokens is not None:
            shared["tokens"] = tokens
        rope = None if self.rotary is None else self.rotary(positions)
        options = {"rope": rope, "mask": None, "shared": shared}
        layers = [self.layers[n] for n in self.own]
        x, residual = self._through(layers, x, rest[0] if rest else None, options, {}, None)
        if not self.is_last:
            x = self._with_losses(x, factor)
            return (x,) if residual is None else (x, residual)
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
    """Sums the gradients of a weight that the first and the last stage have, after a step."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.has_backward:
            return
        super().perform_reduce_grad(grad_scale_factor)
        stage: Any = self.submod
        if not stage.repeats or stage.is_first == stage.is_last:
            return
        grad = stage.embed_tokens.weight.grad
        if grad is None:  # frozen
            return
        own: Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        assert self.group is not None
        peer = dist.get_global_rank(self.group, self.num_stages - 1 if stage.is_first else 0)
        calls = [
            dist.P2POp(dist.isend, own.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        own.add_(other)


def pipeline_parallel(model: Decoder, mesh: DeviceMesh) -> PipelineStage:
    """Makes a decoder this rank's stage of a pipeline, in place, for the schedules of torch.

    Rank r of N keeps layers r L / N to (r + 1) L / N - 1; the first one has the embedding, the last
    one the final norm and the head. Names of parameters stay the same. Usage, on all ranks:

    ``schedule = Schedule1F1B(pipeline_parallel(model, mesh["pp"]), 4, loss_fn=lambda x, y: x)``
    ``schedule.step(tokens, targets=targets, target=targets)  # without tokens after the first``

    The last stage returns the loss of a microbatch, or logits without `targets`. Losses of routers
    and indexers, each at the stage of its layer, and of multi-token prediction are included in the
    gradients. The argument `share` of `step`, one number for each microbatch, multiplies its loss,
    as for microbatches with different numbers of targets and ``scale_grads=False``.

    A weight that embedding and head share is at the first and the last stage. At the end of `step`
    they exchange its gradients, and both get the sum. Call `step` once for each optimizer step, and
    leave out the last stage's copy in the norm of all gradients.

    Args:
        model: a decoder of DecoderBlocks, equal on all ranks. Split it by `expert_parallel` and
            `tensor_parallel` before this, and by `fully_shard` after it.
        mesh: mesh of one dimension with N ranks, such as ``mesh["pp"]``. N divides the layers.

    Returns:
        The stage; its `submod` is the model.

    Raises:
        TypeError: the mesh is not a DeviceMesh, or the model not a Decoder.
        ValueError: the mesh has several dimensions, or N does not divide the layers. Nothing has
            been changed then.
        NotImplementedError: layers read values, keys or embeddings of layers at other stages, as
            RWKV-7 and Zamba2 do.

    Note:
        Stages exchange the residual stream as the blocks do, as its sum so far and the last output,
        (B, T, dim) each.

    Reference:
        Huang et al., GPipe, 2018, arXiv:1811.06965; Narayanan et al., PipeDream (1F1B), 2018,
        arXiv:1806.03377.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{OP}: mesh must be a DeviceMesh, got mesh={shown(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"{OP}: mesh must have one dimension, as mesh['pp'], got mesh={mesh}")
    if not isinstance(model, Decoder):
        raise TypeError(f"{OP}: model must be a Decoder, got {type(model).__name__}")
    stages, stage = mesh.size(), mesh.get_local_rank()
    if not len(model.layers) or len(model.layers) % stages:
        raise ValueError(
            f"{OP}: the ranks must divide the layers, got num_layers={len(model.layers)}, "
            f"ranks={stages}"
        )
    for block in model.layers:
        _require_alone(block)
    kind = type(model)
    model.__class__ = type(f"{kind.__name__}Stage", (DecoderStage, kind), {})
    cast(DecoderStage, model).cut(stage, stages)
    device = next(model.parameters()).device
    return _Stage(model, stage, stages, device, group=mesh.get_group())


def same_stage(stage: PipelineStage) -> PipelineStage:
    """Returns another stage of the same model, for a schedule of batches of another shape."""
    return _Stage(
        stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group
    )


def _require_alone(block: nn.Module) -> None:
    """Requires that a block reads nothing but the residual stream and tokens."""
    if not isinstance(block, DecoderBlock):
        raise NotImplementedError(
            f"{OP}: layers of a decoder must be DecoderBlocks, got {type(block).__name__}"
        )
    config: Any = block.mixer.config
    for name in ("value_residual", "shared_kv"):
        if getattr(config, name, None) is not None:
            raise NotImplementedError(
                f"{OP}: {name} must be None, as stages exchange the residual stream only, "
                f"got {name}={shown(getattr(config, name))}"
            )
    if block.mixer.shares and not isinstance(block.mixer, Attention):
        raise NotImplementedError(
            f"{OP}: cannot divide {type(block.mixer).__name__}, whose layers read those of others"
        )
