"""How layers are split over ranks: the config of a rank's part, from which all shapes follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import Shard

from omniattn.checks.arguments import shown
from omniattn.distributed.tensor.parts import Part
from omniattn.functional.layers.moe import ACTIVATIONS
from omniattn.modules import (
    MLP,
    Attention,
    DeltaNet,
    Experts,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMLP,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    MultiHeadLatentAttention,
)
from omniattn.modules.base.layer import LayerConfig

OP = "tensor_parallel"
#: Names of the projections whose outputs the ranks sum.
_OUTPUTS = ("o_proj", "out_proj", "down_proj")
#: Names of the biases of these projections, which one rank adds.
_ADDED = {*(f"{name}.bias" for name in _OUTPUTS), "down_proj_bias"}


class Split(NamedTuple):
    """Config of a rank's part of a layer.

    Attributes:
        config: config with a rank's heads or hidden channels.
        joined: names of parameters whose rows are several parts, each divided among the ranks, and
            the sizes of these parts.
        halves: names of parameters whose dimension 1 has two halves, each divided among the ranks.
    """

    config: LayerConfig
    joined: Mapping[str, tuple[int, ...]] = {}
    halves: tuple[str, ...] = ()


def _divided(layer: str, name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(
            f"{OP}: the ranks must divide {name} of {layer}, got {name}={size}, ranks={ranks}"
        )
    return size // ranks


def _shared(layer: str, name: str, size: int, ranks: int) -> int:
    """Returns the number of heads of a rank; several ranks may have the same one."""
    if size % ranks and ranks % size:
        raise ValueError(
            f"{OP}: the ranks must divide {name} of {layer} or be a multiple of it, "
            f"got {name}={size}, ranks={ranks}"
        )
    return max(1, size // ranks)


def _refuse(layer: str, config: Any, **allowed: Any) -> None:
    """Raises unless these options of a config have the allowed values."""
    for name, value in allowed.items():
        got = getattr(config, name)
        if got != value:
            raise NotImplementedError(
                f"{OP}: {layer} must have {name}={shown(value)}, got {name}={shown(got)}"
            )


def _attention(c: Attention.Config, ranks: int) -> Split:
    _refuse("Attention", c, cross=False)
    if c.qk_norm == "rms_full":
        raise NotImplementedError(
            f"{OP}: qk_norm of Attention must be one of single heads, got qk_norm='rms_full'"
        )
    heads = _divided("Attention", "num_heads", c.num_heads, ranks)
    kv_heads = _shared("Attention", "num_kv_heads", c.kv_heads, ranks)
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads}
    # The slopes of a rank's heads are given to its calls.
    return Split(replace(c, **sizes, head_dim=c.head_size, alibi=None, alibi_scale=1.0))


def _latent_attention(c: MultiHeadLatentAttention.Config, ranks: int) -> Split:
    _refuse("MultiHeadLatentAttention", c, num_latents=1, num_branches=1)
    heads = _divided("MultiHeadLatentAttention", "num_heads", c.num_heads, ranks)
    return Split(replace(c, num_heads=heads))


def _recurrence(c: Any, ranks: int) -> Split:
    layer = c.layer.__name__
    values = _divided(layer, "num_v_heads", c.v_heads, ranks)
    keys = _shared(layer, "num_heads", c.num_heads, ranks)
    sizes = {"num_heads": keys, "num_v_heads": values}
    return Split(replace(c, **sizes, head_dim=c.k_size, v_head_dim=c.v_size))


def _linear_attention(c: LinearAttention.Config, ranks: int) -> Split:
    heads = _divided("LinearAttention", "num_heads", c.num_heads, ranks)
    return Split(replace(c, num_heads=heads, head_dim=c.v_size, feature_dim=c.k_size))


@dataclass(frozen=True)
class _PartOfMamba2(Mamba2.Config):
    """Config of a rank's part of a Mamba2, with `ngroups` those of the rank."""

    ranks: int = 1

    @property
    def width(self) -> int:
        return self.expand * self.dim // self.ranks


def _mamba2(c: Mamba2.Config, ranks: int) -> Split:
    _divided("Mamba2", "expand * dim / headdim", c.num_heads, ranks)
    groups = _divided("Mamba2", "ngroups", c.ngroups, ranks)  # the norm is over a group
    fields = {name: getattr(c, name) for name in Mamba2.Config.__dataclass_fields__}
    config = _PartOfMamba2(**fields | {"ngroups": groups}, ranks=ranks)
    shared = c.ngroups * c.d_state
    convolved = (c.width, shared, shared)
    projected = (c.width, *convolved, c.num_heads)
    joined = {"in_proj": projected, "conv1d": convolved}
    kinds = ("weight", "bias")
    return Split(config, {f"{n}.{kind}": sizes for n, sizes in joined.items() for kind in kinds})


def _mlp(c: MLP.Config, ranks: int) -> Split:
    layer = c.layer.__name__
    _refuse(layer, c, learned=None)
    return Split(replace(c, hidden_dim=_divided(layer, "hidden_dim", c.hidden_dim, ranks)))


def _experts(c: Experts.Config, ranks: int) -> Split:
    gated = ACTIVATIONS[c.activation][1] and ranks > 1
    halves = ("gate_up_proj", "gate_up_proj_bias") if gated else ()
    size = _divided("Experts", "hidden_dim", c.hidden_dim, ranks)
    return Split(replace(c, hidden_dim=size), halves=halves)


#: Layer -> the split of its config. Subclasses of a layer may depend on the numbers of their heads.
SPLITS: dict[type[nn.Module], Callable[[Any, int], Split]] = {
    Attention: _attention,
    MultiHeadLatentAttention: _latent_attention,
    DeltaNet: _recurrence,
    Experts: _experts,
    GatedDeltaNet: _recurrence,
    GatedLinearAttention: _recurrence,
    KimiDeltaAttention: _recurrence,
    LinearAttention: _linear_attention,
    Mamba2: _mamba2,
    MLP: _mlp,
    GatedMLP: _mlp,
}


def is_split(layer: nn.Module) -> bool:
    """Returns True if the layer is one of those that can be split.

    Experts with default vectors, which are means of whole outputs, are not.
    """
    return type(layer) in SPLITS and getattr(layer, "default_vectors", None) is None


def split_of(layer: Any, ranks: int) -> Split:
    """Returns the split of a layer's config.

    Raises:
        ValueError: heads or hidden channels that the ranks do not divide.
        NotImplementedError: the layer or an option of it has no split.
    """
    if not is_split(layer):
        known = ", ".join(sorted(kind.__name__ for kind in SPLITS))
        raise NotImplementedError(
            f"{OP}: cannot split {type(layer).__name__}; layers that it splits are {known}"
        )
    return SPLITS[type(layer)](layer.config, ranks)


def parts_of(layer: nn.Module, split: Split, ranks: int, rank: int) -> dict[str, Part]:
    """Returns the parts of a layer's parameters, and gives the layer the sizes of its part.

    A parameter that is narrower in the part is divided among the ranks, or, if it is of fewer heads
    than ranks, stored whole. One of the same shape is used by the heads of all ranks.
    """
    local: nn.Module = split.config.build(device="meta")
    shapes = {name: p.shape for name, p in local.named_parameters()}
    parts: dict[str, Part] = {}
    for name, p in layer.named_parameters():
        narrowed = [n for n, (a, b) in enumerate(zip(p.shape, shapes[name], strict=True)) if a != b]
        if name in split.joined:
            parts[name] = Part(Shard(0), True, _rows(split.joined[name], ranks, rank))
        elif not narrowed:
            parts[name] = Part(summed=True, zeroed=name in _ADDED and rank > 0)
        elif p.shape[narrowed[0]] == ranks * shapes[name][narrowed[0]]:
            parts[name] = Part(Shard(narrowed[0]), halves=name in split.halves)
        else:
            assert narrowed == [0], f"{name} of {type(layer).__name__}"
            count = shapes[name][0]
            first = rank * (p.shape[0] // count) // ranks * count
            parts[name] = Part(summed=True, rows=(slice(first, first + count),))
    vars(layer).pop("_state_shapes", None)  # of the whole layer
    for path, module in local.named_modules():
        sizes = {k: v for k, v in vars(module).items() if k[0] != "_" and k != "training"}
        vars(layer.get_submodule(path)).update(sizes)
    return parts


def _rows(sizes: tuple[int, ...], ranks: int, rank: int) -> tuple[slice, ...]:
    """Returns a rank's rows of parts that follow each other."""
    rows, start = [], 0
    for size in sizes:
        count = size // ranks
        rows.append(slice(start + rank * count, start + (rank + 1) * count))
        start += size
    return tuple(rows)
