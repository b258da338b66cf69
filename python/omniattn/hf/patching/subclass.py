"""Makes subclasses of transformers' classes with another forward, and finds the originals."""

from __future__ import annotations

import functools
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor

from omniattn.hf import loss
from omniattn.hf.attention.rotary import rotary_forward
from omniattn.hf.common import packed
from omniattn.hf.common.probe import Forward
from omniattn.hf.patching import layers
from omniattn.hf.patching.register import register
from omniattn.hf.recurrent.recurrent import recurrent_forward

__all__ = ["original_of", "subclass"]

_log = logging.getLogger("omniattn")

#: Functions that make a class's forward. Their results are closures, which cannot be pickled; all
#: other forwards are module-level functions.
_MAKERS = (
    rotary_forward,
    recurrent_forward,
    loss.causal_lm_forward,
    packed.recomputed_forward,
    packed.model_forward,
    loss.packed_causal_lm_forward,
)
_LINEARS = (layers.linear, loss.head)


@functools.cache
def subclass(original: Any, forward: Forward) -> Any:
    """Returns a subclass of `original` with another forward.

    Instances get no further state, so copies are correct, including DataParallel's.
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        named = next((make for make in _MAKERS if make(original) is forward), forward)
        state = original.__reduce_ex__(self, max(protocol, 2))[2]
        return _patched_instance, (original, named), state

    reads_weight = forward in (*_LINEARS, *layers.NORMS, *layers.WIDENING_NORMS)
    body = {
        "forward": _or_original(forward) if reads_weight else forward,
        "omniattn_original": original,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
    }
    if forward in _LINEARS:
        body["qconfig"] = property(_no_qconfig, _refuse_qconfig)
    if forward in (loss.head, loss.plain_head):
        body |= {"__call__": loss.call_head, "omniattn_defers": False}
    if packed.is_recomputed(original, forward):
        body["__call__"] = packed.call_layer
    return type(original.__name__, (original,), body)


@functools.cache
def original_of(kind: Any) -> Any:
    """Returns the class from which `kind` was made.

    Sees through later subclasses of ours by torch: fully_shard and parametrisations subclass the
    current class.
    """
    if "omniattn_original" in vars(kind):
        return kind.omniattn_original
    if not hasattr(kind, "omniattn_original"):
        return kind
    body = {name: x for name, x in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(map(original_of, kind.__bases__)), body)


def _patched_instance(original: Any, named: Forward) -> Any:
    """Makes an empty instance of the subclass for pickle, in any process."""
    register()
    kind = subclass(original, named(original) if named in _MAKERS else named)
    return kind.__new__(kind)


def _or_original(forward: Forward) -> Forward:
    """Wraps `forward` to fall back to the module's own forward without a kernel for its weight.

    This concerns weights that became another tensor class, or whose dtype differs from x's.
    Autocast casts both to one dtype, except for norms that accept half-precision rows with fp32
    weights, with and without autocast.
    """
    widens = forward in layers.WIDENING_NORMS

    @functools.wraps(forward)
    def checked(self: Any, x: Tensor, *loss: Any) -> Any:
        weight = self.weight
        if loss:  # from loss.py, which has checked the head's weight
            return forward(self, x, *loss)
        if hasattr(type(weight), "__tensor_flatten__"):
            reason = f"its weight is a {type(weight).__name__}"
        elif x.dtype != weight.dtype and not (
            weight.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
            if widens
            else torch.is_autocast_enabled(x.device.type)
        ):
            # Models with an fp32 residual stream and half-precision weights.
            reason = f"its input is {x.dtype} and its weight {weight.dtype}"
        else:
            return forward(self, x)
        if not torch.compiler.is_compiling():
            kind = self.omniattn_original.__name__
            _log_once(f"patch: {kind} runs its own forward: {reason}")
        return self.omniattn_original.forward(self, x)

    return checked


@functools.cache
def _log_once(message: str) -> None:
    _log.warning(message)


def _no_qconfig(self: Any) -> NoReturn:
    raise AttributeError("qconfig")


def _refuse_qconfig(self: Any, _: Any) -> NoReturn:
    """Raises: torch.ao.quantization matches exact classes and would skip patched layers."""
    raise RuntimeError(
        "omniattn.hf.patch: linears must not be patched when torch.ao quantises the model: "
        "unpatch, quantise, and patch again"
    )
