"""Finds the forward of this package that is equivalent to a transformers layer."""

from __future__ import annotations

import collections
import copy
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import nn

from omniattn.hf.attention.alibi import bloom_forward, find_alibi, mpt_forward
from omniattn.hf.attention.deberta import disentangled_forward, find_disentangled
from omniattn.hf.attention.longformer import find_longformer, longformer_forward
from omniattn.hf.attention.rotary import rotary_forward
from omniattn.hf.attention.sdpa import find_sdpa, sdpa_forward
from omniattn.hf.common.probe import Finding, Forward, Left, same, twin
from omniattn.hf.patching import layers
from omniattn.hf.patching.bigbird import block_sparse_forward, find_bigbird, full_forward
from omniattn.hf.recurrent.recurrent import recurrent_forward

__all__ = ["ATTENTIONS", "FINDERS", "Chosen", "PatchOptions"]

#: Forwards of attention layers that do not use transformers' AttentionInterface.
ATTENTIONS: tuple[Forward, ...] = (
    sdpa_forward,
    longformer_forward,
    block_sparse_forward,
    full_forward,
    disentangled_forward,
    bloom_forward,
    mpt_forward,
)


def _attention(module: nn.Module) -> Finding:
    found = find_sdpa(module) or find_longformer(module) or find_bigbird(module)
    return found or find_disentangled(module) or find_alibi(module)


def _linear(module: nn.Module) -> Finding:
    kind = type(module)
    if not isinstance(module, nn.Linear):
        if not kind.__name__.endswith("Linear"):
            return None
        return Left(f"it is of {kind.__module__}")  # quantised, or an adapter around an nn.Linear
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None  # nn.MultiheadAttention reads only the weight and never calls it
    if kind.forward is not nn.Linear.forward:
        return Left("it has a forward of its own")
    if not _holds_plain_weight(module):
        return Left(f"its weight is a {type(module.weight).__name__}", logging.WARNING)
    return layers.linear


def _norm(module: nn.Module) -> Finding:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return None
    # FalconMamba's norm without a weight stores ones in a buffer named weight.
    if not isinstance(weight, nn.Parameter):
        return Left("it has no weight")
    if weight.dim() != 1 or weight.numel() == 0:
        return Left(f"its weight has the shape {tuple(weight.shape)}")
    if math.isnan(layers.eps(module)):
        return Left("it has no eps")
    if module._modules:
        return Left("it has layers of its own")
    if not _holds_plain_weight(module):
        return Left(f"its weight is a {type(weight).__name__}", logging.WARNING)
    size = weight.shape[0]
    # bf16 distinguishes formulas that round in different places.
    found = same(
        lambda dtype: twin(module, dtype, {}), layers.NORMS, size, [torch.float32, torch.bfloat16]
    )
    if isinstance(found, Left) or found is layers.layer_norm:
        return found
    # The norms differ for bf16 rows with fp32 weights.
    wide = twin(module, torch.float32, {})
    mixed = same(lambda _: wide, layers.WIDENING_NORMS, size, [torch.bfloat16])
    return found if isinstance(mixed, Left) and found is layers.rms_norm else mixed


#: Submodules and weight shapes of a gated MLP: separate or fused gate and up, and T5's naming.
_MLP_PARTS: tuple[dict[str, tuple[int, int] | None], ...] = (
    {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)},
    {"gate_up_proj": (8, 32), "down_proj": (16, 8)},
    {"wi_0": (8, 16), "wi_1": (8, 16), "wo": (16, 8), "dropout": None},
)


def _mlp(module: nn.Module) -> Finding:
    parts = next((each for each in _MLP_PARTS if each.keys() <= module._modules.keys()), None)
    if parts is None:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return Left("its forward takes more than x")  # Zamba 2's adapters
    others = {
        name: each
        for name, each in module._modules.items()
        if each is not None and parts.get(name) is None
    }
    inner = [each for other in others.values() for each in other.modules()]
    if module._parameters or any(each._parameters for each in inner):
        return Left("it has further parameters")
    if any(each._forward_hooks or each._forward_pre_hooks for each in inner):
        return Left("its activation has a hook, which would not be called", logging.WARNING)

    # Our forward calls the projections, which may be adapted, quantised or sharded. The comparison
    # concerns the formula between them alone, so small stand-ins replace them.
    def small(dtype: torch.dtype) -> Any:
        generator = torch.Generator().manual_seed(0)
        fresh = {name: copy.deepcopy(each).train() for name, each in others.items()}
        for name, size in parts.items():
            if size is not None:
                linear = fresh[name] = nn.Linear(*size, device="cpu", dtype=dtype)
                nn.init.normal_(linear.weight, generator=generator)
                nn.init.normal_(linear.bias, generator=generator)
        return twin(module, dtype, fresh)

    return same(small, layers.MLPS, 8, [torch.float32])


def _rotary(module: nn.Module) -> Finding:
    kind: Any = type(module)
    return rotary_forward(kind)


def _mixer(module: nn.Module) -> Finding:
    kind: Any = type(module)
    return recurrent_forward(kind)


def _holds_plain_weight(module: Any) -> bool:
    """True if forward will see an ordinary weight.

    Excludes torchao's quantised subclasses, and DTensors unless fully_shard will gather them.
    """
    sharded = getattr(module, "_is_fsdp_managed_module", False)
    return sharded or not hasattr(type(module.weight), "__tensor_flatten__")


class PatchOptions(TypedDict, total=False):
    """Options of :func:`patch`."""

    attention: bool
    linear: bool
    norm: bool
    mlp: bool
    rope: bool
    mixer: bool
    loss: bool
    linear_cross_entropy: bool
    experts: bool


#: Options of a call, all True by default. Their names are listed once, above.
Chosen: Any = collections.namedtuple(  # type: ignore[misc]
    "Chosen",
    PatchOptions.__annotations__,
    defaults=[True] * len(PatchOptions.__annotations__),  # type: ignore[misc]
)

#: Option of `patch` -> function that finds the forward of a module. The other options are not
#: about a kind of layer.
FINDERS: dict[str, Callable[[nn.Module], Finding]] = {
    "attention": _attention,
    "linear": _linear,
    "norm": _norm,
    "mlp": _mlp,
    "rope": _rotary,
    "mixer": _mixer,
}
