"""tensor_parallel: layers and decoders whose weights and heads are divided among ranks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import parallelize_module

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.distributed.tensor.parts import WHOLE, Part, distribute, move, read_parts
from omniattn.distributed.tensor.splits import OP, Split, is_split, split_of
from omniattn.distributed.tensor.styles import TOKENS, Around, RandomPerRank, SplitLayer, SplitRows
from omniattn.distributed.tensor.vocabulary import vocabulary_parallel_cross_entropy
from omniattn.models.decoders.decoder import Decoder
from omniattn.modules import DecoderBlock, Dropout, MoE
from omniattn.modules.experts.expert_parallel import SplitExperts

M = TypeVar("M", bound=nn.Module)


def tensor_parallel(model: M, mesh: DeviceMesh, sequence_parallel: bool = False) -> M:
    """Splits a decoder or a layer over the ranks of a mesh, in place: heads and hidden channels.

    A rank has the heads of attention and of recurrences from number r H / N on, as many hidden
    channels of each MLP, and rows of the embedding and of the head. It computes with them what one
    process would, up to rounding: the calls, the loss and the gradients are those of the whole
    model, on all ranks. Layers exchange activations twice in the forward and in the backward each:
    an all-reduce, or with `sequence_parallel` a reduce-scatter and an all-gather.

    Parameters become DTensors, with their names and shapes: torch's optimizers, `fully_shard` over
    another dimension of the mesh, `get_model_state_dict` and distributed checkpoints take them as
    they are. Of a mixture of experts a rank has hidden channels of every expert, and the whole
    router, which all ranks compute. Experts that `expert_parallel`, before this, has divided over
    another dimension, and those with default vectors, are whole on each rank.

    Args:
        model: a Decoder whose mixers are Attention, MultiHeadLatentAttention, DeltaNet,
            GatedDeltaNet, KimiDeltaAttention, GatedLinearAttention, LinearAttention or Mamba2; or
            one of these layers, MLP, GatedMLP, Experts or MoE. Parameters become those of the
            mesh's first rank.
        mesh: mesh of one dimension with N ranks, such as ``mesh["tp"]``. N divides heads, hidden
            channels, groups of Mamba2 and the vocabulary, and divides kv heads or is a multiple of
            them.
        sequence_parallel: True to keep 1 / N of the tokens on each rank between the layers of the
            model, of which N must be a divisor. A single layer then takes and returns them.

    Returns:
        The model.

    Raises:
        TypeError: the mesh is not a DeviceMesh.
        ValueError: the mesh has several dimensions, does not divide a size, or the model has
            DTensors already. Nothing has been changed then.
        NotImplementedError: a layer or an option without a split.

    Note:
        All ranks make the same calls with the same tokens, and seed torch's generator equally.
        Dropout within split layers then differs between the ranks, as it should, and is not that of
        one process. Parameters of Mamba2's in_proj and conv1d are stored in equal parts, but
        gathered for the forward, as their rows are of several kinds. Those of experts' gate_up_proj
        are exchanged for it, so that a rank has its channels of both halves.

    Reference:
        Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053; Korthikanti et al., Reducing Activation
        Recomputation in Large Transformer Models, 2022, arXiv:2205.05198 (sequence_parallel).
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{OP}: mesh must be a DeviceMesh, got mesh={shown(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"{OP}: mesh must have one dimension, as mesh['tp'], got mesh={mesh}")
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            if isinstance(p, DTensor) and not isinstance(module, SplitExperts):
                raise ValueError(
                    f"{OP}: model must have whole parameters, as before fully_shard and another "
                    f"{OP}, got a DTensor {name}"
                )
    if isinstance(model, Decoder):
        _Splitter(model, mesh, sequence_parallel).run()
        return model
    if isinstance(model, MoE):
        layers = _Layers(model, mesh)
        parallelize_module(model, mesh, Around(sequence_parallel, split=False))
        layers.unit(model, False)
        return model
    style = SplitLayer(split_of(model, mesh.size()), sequence_parallel, reads=True)
    parallelize_module(model, mesh, style)
    return model


class SplitDecoder(Decoder):
    """A decoder after `tensor_parallel`, whose rank has some rows of the head."""

    mesh: DeviceMesh

    def _own_rows(self) -> Tensor:
        weight = self.head_weight
        assert isinstance(weight, DTensor)
        return weight.to_local()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if x.is_nested:
            x, targets = x.values(), targets.values()
        c = self.config
        options: dict[str, Any] = {"softcap": c.logit_softcap, "backend": c.backend}
        return vocabulary_parallel_cross_entropy(x, self._own_rows(), targets, self.mesh, **options)

    def head(self, x: Tensor) -> Tensor:
        if x.is_nested:
            nested: Any = x
            return torch.nested.nested_tensor_from_jagged(self.head(x.values()), nested.offsets())
        x = move(x, self.mesh, WHOLE, WHOLE, Partial())
        logits = functional.linear(x, self._own_rows(), backend=self.config.backend)
        if cap := self.config.logit_softcap:
            logits = cap * (logits / cap).tanh()
        return move(logits, self.mesh, Shard(logits.dim() - 1), WHOLE, WHOLE)


class _Layers:
    """Splits the layers of a module.

    Raises:
        ValueError: the ranks do not divide a size. Nothing has been changed then.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.splits: dict[nn.Module, Split] = {
            layer: split_of(layer, mesh.size()) for layer in module.modules() if is_split(layer)
        }

    def unit(self, module: nn.Module, sequence_parallel: bool) -> None:
        """Splits the layers in a module, whose forward then reads all its parameters."""
        if parts := self.parts("", module, sequence_parallel):
            read_parts(module, parts)

    def parts(self, path: str, module: nn.Module, sequence_parallel: bool) -> dict[str, Part]:
        """Splits the layers in a module, and returns the parts of all its parameters.

        With `sequence_parallel` the module reads this rank's tokens, so that gradients of whole
        parameters are summed.
        """
        if isinstance(module, SplitExperts):
            return {}  # equal on all ranks, and it reads its parts itself
        if module in self.splits:
            style = SplitLayer(self.splits[module], sequence_parallel)
            parallelize_module(module, self.mesh, style)
            return {f"{path}{name}": part for name, part in style.parts.items()}
        if isinstance(module, Dropout) and module.p and sequence_parallel:
            RandomPerRank(self.mesh.get_local_rank()).register(module)
        own = {
            name: Part(summed=sequence_parallel) for name, _ in module.named_parameters("", False)
        }
        distribute(module, self.mesh, own)
        found = {f"{path}{name}": part for name, part in own.items()}
        for name, child in module.named_children():
            reads_tokens = sequence_parallel
            if (
                isinstance(module, DecoderBlock)
                and child is module.mlp
                and child not in self.splits
            ):
                parallelize_module(child, self.mesh, Around(sequence_parallel, split=False))
                reads_tokens = False  # all tokens
            found |= self.parts(f"{path}{name}.", child, reads_tokens)
        return found


class _Splitter(_Layers):
    """Splits a decoder, after all checks."""

    def __init__(self, model: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.model, self.mesh = model, mesh
        self.sequence_parallel = sequence_parallel and len(model.layers) > 0
        self.check()
        super().__init__(model, mesh)

    def check(self) -> None:
        model, config, ranks = self.model, self.model.config, self.mesh.size()
        for block in model.layers:
            if not isinstance(block, DecoderBlock):
                raise NotImplementedError(
                    f"{OP}: layers of a decoder must be DecoderBlocks, got {type(block).__name__}"
                )
        if config.vocab_size % ranks:
            raise ValueError(
                f"{OP}: the ranks must divide vocab_size, got vocab_size={config.vocab_size}, "
                f"ranks={ranks}"
            )
        if config.l2_wrap:
            raise NotImplementedError(f"{OP}: l2_wrap must be 0, got l2_wrap={config.l2_wrap}")
        for block in (m for m in model.modules() if isinstance(m, DecoderBlock)):
            if not is_split(block.mixer):
                split_of(block.mixer, ranks)  # raises
            if block.cross_attn is not None:
                raise NotImplementedError(
                    f"{OP}: cross must be None in blocks, got cross-attention"
                )
            if block.canon is not None:
                raise NotImplementedError(f"{OP}: canon must be '' in blocks, got Canon layers")
            if block.engram is not None:
                raise NotImplementedError(f"{OP}: engram must be None in blocks, got an Engram")
            if block.mixer_streams is not None and self.sequence_parallel:
                raise NotImplementedError(
                    f"{OP}: sequence_parallel must be False with residual streams, got True"
                )

    def run(self) -> None:
        """Splits each child of the model; a child reads its parameters in its own forward, so that
        `hidden` and recomputation do, too."""
        model, mesh = self.model, self.mesh
        for name, child in model.named_children():
            if child is model.embed_tokens:
                parallelize_module(child, mesh, SplitRows())
            elif child is model.lm_head:
                distribute(child, mesh, {"weight": Part(Shard(0))})
            elif child is model.layers:
                for block in child:
                    self.unit(block, self.sequence_parallel)
            else:
                self.unit(child, self.sequence_parallel and name == "norm")
        if self.sequence_parallel:
            model.layers[0].register_forward_pre_hook(self.scatter)
            model.norm.register_forward_hook(self.gather)
        kind = type(model)  # a class of both, as fully_shard makes one
        model.__class__ = type(f"Split{kind.__name__}", (SplitDecoder, kind), {})
        model.mesh = mesh  # type: ignore[assignment]

    def scatter(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gives the first block this rank's tokens."""
        x, *rest = args
        if x.is_nested or x.shape[1] % self.mesh.size():
            got = "nested tokens" if x.is_nested else f"T={x.shape[1]}"
            raise ValueError(
                f"{OP}: with sequence_parallel the ranks must divide the tokens, got {got}, "
                f"ranks={self.mesh.size()}"
            )
        return move(x, self.mesh, WHOLE, TOKENS, TOKENS), *rest

    def gather(self, norm: nn.Module, args: Any, found: Any) -> Any:
        """Returns all tokens after the last norm."""
        y, *rest = found if isinstance(found, tuple) else (found,)
        y = move(y, self.mesh, TOKENS, WHOLE, WHOLE)
        return (y, *rest) if isinstance(found, tuple) else y
