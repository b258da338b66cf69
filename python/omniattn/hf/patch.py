"""Swaps the layers of one transformers model for this package's kernels, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from omniattn.hf import layers
from omniattn.hf.experts import why_unsupported
from omniattn.hf.probe import Finding, Forward, Left, same, twin
from omniattn.hf.register import own_attention, register
from omniattn.hf.rotary import rotary_forward

__all__ = ["patch", "unpatch"]

_log = logging.getLogger("omniattn")


def patch(
    model: nn.Module,
    *,
    attention: bool = True,
    linear: bool = True,
    norm: bool = True,
    mlp: bool = True,
    rope: bool = True,
    loss: bool = True,
    experts: bool = True,
) -> dict[str, int]:
    """Makes `model` compute with this package's kernels; parameters and their names stay.

    A layer gets a subclass of its own class with another forward, so that other models, copies,
    checkpoints and hooks are not touched. Norms, gated MLPs and rotary functions are recognised by
    what they compute: a copy of each is run on a probe, and the layer swapped if ours gives the
    same. What stays as it is goes to the logger "omniattn" with the reason: as a warning where a
    layer cannot be swapped, such as an attention that does not ask transformers'
    AttentionInterface (BLOOM, Falcon, GPT-J); at debug level where it computes something else.

    The model may be sharded by fully_shard, have adapters, or be wrapped by DDP, torch.compile or
    PEFT, before or after. Quantise first: torch.ao's quantize_dynamic raises on a patched linear.

    A patched model can be pickled: by torch.save as a whole, or to a process that is spawned. Where
    `attention` or `experts` alone were patched, that process has to call :func:`register` first.

    Args:
        model: of transformers, weights loaded; or DistributedDataParallel, DataParallel,
            torch.compile or PEFT around one.
        attention: set its attention implementation; counted are the layers that ask for it.
        linear: nn.Linear.
        norm: RMSNorm in its spellings, and LayerNorm.
        mlp: down_proj(act(gate_proj(x)) * up_proj(x)); the same with one gate_up_proj (Phi-3,
            GLM-4); wo(dropout(act(wi_0(x)) * wi_1(x))) (T5 v1.1). act: SiLU, GELU, tanh GELU, ReLU.
            The projections are called as before, with what adapters and quantisation made of them;
            act is not, nor are hooks that it gets later.
        rope: apply_rotary_pos_emb of attention layers, half-split or interleaved (Cohere, GLM-4),
            with the heads before or after the tokens, as unsqueeze_dim says.
        loss: the loss of causal language models.
        experts: set its experts implementation, if this package has the activation of its experts.

    Returns:
        What was swapped, and how often: {"linear": 15, "norm": 5, ...}.

    Raises:
        TypeError: another class of model.
        ValueError: the model is patched already, or on the meta device.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=97))
        >>> sorted(patch(model).items())
        [('attention', 1), ('linear', 8), ('loss', 1), ('mlp', 1), ('norm', 3), ('rope', 1)]
        >>> unpatch(model)
    """
    inner = _unwrap(model)
    if any(_is_patched(module) for module in inner.modules()):
        raise ValueError("omniattn.hf.patch: model must not be patched already")
    if any(p.is_meta for p in inner.parameters()):
        raise ValueError("omniattn.hf.patch: weights must be loaded, got some on the meta device")
    finders: dict[str, Callable[[nn.Module], Finding]] = {}
    if linear:
        finders["linear"] = _find_linear
    if norm:
        finders["norm"] = _find_norm
    if mlp:
        finders["mlp"] = _find_mlp
    if rope:
        finders["rope"] = _find_rotary
    count: Counter[str] = Counter()
    left: list[tuple[str, nn.Module, Left]] = []
    for module, (name, find) in itertools.product(list(inner.modules()), finders.items()):
        found = find(module)
        if isinstance(found, Left):
            left.append((name, module, found))
        elif found is not None and "forward" in module.__dict__:
            reason = "its forward was replaced on the instance, as accelerate and kernelize do"
            left.append((name, module, Left(reason, logging.WARNING)))
        elif found is not None:
            kind: Any = type(module)
            module.__class__ = _subclass(kind, found)
            count[name] += 1
    if loss and inner.loss_function is ForCausalLMLoss:
        inner.loss_function = layers.causal_lm_loss
        count["loss"] = 1
    for name, module, why_not in _set_interfaces(inner, attention, experts):
        if why_not is None:
            count[name] += 1
        else:
            left.append((name, module, Left(why_not, logging.WARNING)))
    lines = Counter((each.level, name, type(m).__name__, each.reason) for name, m, each in left)
    for (level, name, kind, reason), times in lines.items():
        _log.log(level, "patch: %s: %d %s unchanged: %s", name, times, kind, reason)
    return dict(count)


def _set_interfaces(
    model: PreTrainedModel, attention: bool, experts: bool
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Sets the implementations of `model`; all layers of attention and experts, each with None or
    the reason why it does not run on this package."""
    layers = list(filter(_asks_for_attention, model.modules())) if attention else []
    # With such a part, a composite model does not take the name of another attention.
    own = next(filter(None, map(own_attention, _pretrained_parts(model))), None)
    mixtures = [m for m in model.modules() if hasattr(m, "has_post_expert_norm")] if experts else []
    unsupported = next(filter(None, map(why_unsupported, mixtures)), None)
    if layers or (mixtures and not unsupported):
        register()
        for part in _pretrained_parts(model):
            # transformers looks for its interfaces in the file of a class and keeps the answer with
            # the class; for a class that fully_shard made, it would look into torch's file.
            kind: Any = next(k for k in type(part).__mro__ if not k.__module__.startswith("torch."))
            kind._can_set_attn_implementation()
            kind._can_set_experts_implementation()
            part.__dict__["_omniattn_before"] = {
                name: getattr(part.config, name)
                for name in ("_attn_implementation", "_experts_implementation")
            }
    if layers and own is None:
        model.set_attn_implementation("omniattn")
    if mixtures and not unsupported:
        model.set_experts_implementation("omniattn")

    def why_not(module: nn.Module, setting: str) -> str | None:
        if getattr(getattr(module, "config", None), setting, None) == "omniattn":
            return None
        if own is not None and setting == "_attn_implementation":
            return f"{own} in the same model computes its attention itself"
        return "transformers does not set its implementation"

    for layer in layers:
        yield "attention", layer, why_not(layer, "_attn_implementation")
    for other in _other_attention(model) if attention else ():
        yield "attention", other, "it does not ask transformers' AttentionInterface"
    for mixture in mixtures:
        yield "experts", mixture, unsupported or why_not(mixture, "_experts_implementation")


def unpatch(model: nn.Module) -> None:
    """Undoes :func:`patch`; a model that is not patched stays as it is."""
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(kind, "omniattn_original"):
            module.__class__ = _original(kind)
        if module.__dict__.get("_loss_function") is layers.causal_lm_loss:
            del module._loss_function
    for part in _pretrained_parts(model):
        for name, before in part.__dict__.pop("_omniattn_before", {}).items():
            setattr(part.config, name, before)


def _is_patched(module: nn.Module) -> bool:
    return hasattr(type(module), "omniattn_original") or "_omniattn_before" in module.__dict__


def _pretrained_parts(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _unwrap(model: Any) -> PreTrainedModel:
    """The model of transformers within DDP, torch.compile and PEFT; any of them around another."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # of torch.compile, whose import takes seconds
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # PEFT's
            inner = inner.get_base_model()
        else:
            raise TypeError(
                f"omniattn.hf.patch: model must be a PreTrainedModel, got {type(model).__name__}"
            )
    return inner


@functools.cache
def _log_once(message: str) -> None:
    _log.warning(message)


@functools.cache
def _subclass(original: Any, forward: Forward) -> Any:
    """`original` with another forward. No state on the instance: copies stay right, also those of
    DataParallel."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # A rotary forward is made anew from the class; all others are functions of layers.py.
        named = None if forward is rotary_forward(original) else forward
        state = original.__reduce_ex__(self, max(protocol, 2))[2]
        return _patched_instance, (original, named), state

    reads_weight = forward is layers.linear or forward in layers.NORMS
    body = {
        "forward": _or_original(forward) if reads_weight else forward,
        "omniattn_original": original,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
    }
    if forward is layers.linear:
        body["qconfig"] = property(_no_qconfig, _refuse_qconfig)
    return type(original.__name__, (original,), body)


@functools.cache
def _original(kind: Any) -> Any:
    """The class from which `kind` was made, also below one that torch made of ours meanwhile:
    fully_shard and parametrisations subclass the class that they find."""
    if "omniattn_original" in vars(kind):
        return kind.omniattn_original
    if not hasattr(kind, "omniattn_original"):
        return kind
    body = {name: x for name, x in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(map(_original, kind.__bases__)), body)


def _no_qconfig(self: Any) -> NoReturn:
    raise AttributeError("qconfig")


def _refuse_qconfig(self: Any, _: Any) -> NoReturn:
    """torch.ao.quantization finds layers by their exact class: it would leave this as it is."""
    raise RuntimeError(
        "omniattn.hf.patch: linears must not be patched when torch.ao quantises the model: "
        "unpatch, quantise, and patch again"
    )


def _patched_instance(original: Any, forward: Forward | None) -> Any:
    """An empty module of the subclass, for pickle; the process may not have patched anything."""
    register()
    kind = _subclass(original, rotary_forward(original) if forward is None else forward)
    return kind.__new__(kind)


def _asks_for_attention(module: nn.Module) -> bool:
    """Whether `module` looks up its attention by transformers' AttentionInterface."""
    kind: Any = type(module)
    return "ALL_ATTENTION_FUNCTIONS" in _names(kind)


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    """The names that the methods of a module's class use, PreTrainedModel's excepted."""
    own = [base for base in kind.__mro__ if base not in PreTrainedModel.__mro__]
    methods = [inspect.unwrap(x) for base in own for x in vars(base).values() if callable(x)]
    codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    return frozenset(name for code in codes for name in code.co_names)


def _other_attention(module: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules by name an attention in which none asks for its implementation."""
    if _asks_for_attention(module):
        return
    inner = [other for child in module.children() for other in _other_attention(child)]
    yield from inner
    if inner or "Attention" not in type(module).__name__:
        return
    if not any(map(_asks_for_attention, module.modules())):
        yield module


def _holds_plain_weight(module: Any) -> bool:
    """Whether forward will see an ordinary weight: no DTensor but fully_shard's, which gathers it,
    and no subclass by which torchao quantises."""
    sharded = getattr(module, "_is_fsdp_managed_module", False)
    return sharded or not hasattr(type(module.weight), "__tensor_flatten__")


def _find_linear(module: nn.Module) -> Finding:
    kind = type(module)
    if not isinstance(module, nn.Linear):
        if not kind.__name__.endswith("Linear"):
            return None
        return Left(f"it is of {kind.__module__}")  # quantised, or an adapter around an nn.Linear
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None  # nn.MultiheadAttention's, which reads its weight alone
    if kind.forward is not nn.Linear.forward:
        return Left("it has a forward of its own")
    if not _holds_plain_weight(module):
        return Left(f"its weight is a {type(module.weight).__name__}", logging.WARNING)
    return layers.linear


def _or_original(forward: Forward) -> Forward:
    """`forward`, or the module's own where this package has no kernel: for a weight that became a
    tensor of another class, or has another dtype than x."""

    @functools.wraps(forward)
    def checked(self: Any, x: Tensor) -> Any:
        weight = self.weight
        if hasattr(type(weight), "__tensor_flatten__"):
            reason = f"its weight is a {type(weight).__name__}"
        elif x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            # Models that keep a stream in fp32 and their weights in half precision.
            reason = f"its input is {x.dtype} and its weight {weight.dtype}"
        else:
            return forward(self, x)
        if not torch.compiler.is_compiling():
            kind = self.omniattn_original.__name__
            _log_once(f"patch: {kind} runs its own forward: {reason}")
        return self.omniattn_original.forward(self, x)

    return checked


def _find_norm(module: nn.Module) -> Finding:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return None
    # FalconMamba's norm without a weight has ones in a buffer of that name.
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
    # In bf16 forms differ that round in other places.
    return same(
        lambda dtype: twin(module, dtype, {}), layers.NORMS, size, [torch.float32, torch.bfloat16]
    )


#: The modules of a gated MLP: of the gate and up, or of both at once, and down; T5's dropout.
_MLP_PARTS: tuple[dict[str, tuple[int, int] | None], ...] = (
    {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)},
    {"gate_up_proj": (8, 32), "down_proj": (16, 8)},
    {"wi_0": (8, 16), "wi_1": (8, 16), "wo": (16, 8), "dropout": None},
)


def _find_mlp(module: nn.Module) -> Finding:
    parts = next((each for each in _MLP_PARTS if each.keys() <= module._modules.keys()), None)
    if parts is None:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return Left("its forward takes more than x")  # as the adapters of Zamba 2
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

    # Our forward calls the projections, whatever these are: adapters, quantised, sharded. So small
    # ones tell whether the formula between them is ours.
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


def _find_rotary(module: nn.Module) -> Finding:
    kind: Any = type(module)
    return rotary_forward(kind)
