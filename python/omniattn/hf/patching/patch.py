"""Replaces the layers of a transformers model by this package's kernels, and restores them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import Unpack

from omniattn.checks.arguments import require_bool, shown
from omniattn.encoding.records import packed, spelled_out
from omniattn.hf.attention.alibi import mpt_block_forward
from omniattn.hf.causal_lm import OmniattnForCausalLM
from omniattn.hf.common.interface import asks_for_attention, other_attention, own_attention
from omniattn.hf.common.packed import OTHER_MIXERS, model_forward, recomputed_forward
from omniattn.hf.common.probe import Forward, Left
from omniattn.hf.loss import (
    causal_lm_forward,
    causal_lm_loss,
    head,
    packed_causal_lm_forward,
    plain_head,
)
from omniattn.hf.patching.bigbird import layer_forward
from omniattn.hf.patching.experts import why_unsupported
from omniattn.hf.patching.find import ATTENTIONS, FINDERS, Chosen, PatchOptions
from omniattn.hf.patching.register import register
from omniattn.hf.patching.subclass import original_of, subclass
from omniattn.hf.recurrent.recurrent import recurrent_forward

__all__ = ["is_patched", "patch", "unpatch"]

_log = logging.getLogger("omniattn")

#: Forwards of layers whose inner layers are counted instead.
_OUTER = (layer_forward, mpt_block_forward)


@spelled_out(PatchOptions, Chosen)
def patch(model: nn.Module, **options: Unpack[PatchOptions]) -> dict[str, int]:
    """Replaces layers of `model` by this package's kernels; parameters and their names stay.

    A layer gets a subclass of its own class with another forward, so that other models, copies,
    checkpoints and hooks are not affected. Norms, gated MLPs and rotary functions are recognised by
    probing: a copy of each runs on random inputs, and the layer is replaced if ours gives the same
    results. The logger "omniattn" reports each layer that stays unchanged, with the reason: as a
    warning if the layer cannot be replaced, such as an attention that does not use transformers'
    AttentionInterface (GPT-Neo); at debug level if it computes something else.

    The model may be sharded by fully_shard, have adapters, or be wrapped by DDP, torch.compile or
    PEFT, before or after. Quantise first: torch.ao's quantize_dynamic raises on a patched linear.

    A patched model can be pickled: by torch.save as a whole, or to a spawned process. If only
    `attention` or `experts` was patched, that process has to call :func:`register` first.

    Args:
        model: transformers model with loaded weights, possibly wrapped by
            DistributedDataParallel, DataParallel, torch.compile or PEFT.
        attention: set the attention implementation, and replace torch's
            scaled_dot_product_attention in layers that call it themselves (Falcon, SAM).
            Longformer, LED's encoder and the encoders of BigBird and BigBird-Pegasus run
            `functional.longformer_attention` and `bigbird_attention` with their own masks, random
            blocks and dropout, but return no attention weights, except BigBird for texts so short
            that attention is full. Counts layers.
        linear: nn.Linear.
        norm: RMSNorm in its variants, and LayerNorm.
        mlp: down_proj(act(gate_proj(x)) * up_proj(x)); with one gate_up_proj (Phi-3, GLM-4);
            wo(dropout(act(wi_0(x)) * wi_1(x))) (T5 v1.1). act: SiLU, GELU, tanh GELU, ReLU. The
            projections are called as before, adapted or quantised; act and hooks added to it later
            are not called.
        rope: apply_rotary_pos_emb of attention layers, half-split or interleaved (Cohere, GLM-4),
            with the heads before or after the tokens, as unsqueeze_dim specifies.
        mixer: short convolutions, the scans of Mamba and Mamba-2 in all models that have them, the
            delta rules of Qwen3-Next, Qwen3.5, OLMo hybrid and Kimi Linear, RWKV's weighted mean
            and xLSTM's cell. Counts layers.
        loss: the loss of causal language models.
        linear_cross_entropy: compute this loss in training from the hidden states. No logits are
            computed; a placeholder in the output raises when used. The model's forward takes
            `skip_logits`, as with Liger: False computes logits in training, True skips them in
            evaluation. Adapters and hooks on the head, and losses that a model computes itself,
            still get logits.
        experts: set the experts implementation, if this package supports the activation.

    Returns:
        Number of replacements of each kind: {"linear": 15, "norm": 5, ...}. The loss counts for a
        model that takes labels, even if it computes its loss itself (T5).

    Raises:
        TypeError: the model is of another class, or an option is not a bool.
        ValueError: the model is patched already, or on the meta device.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=97))
        >>> sorted(patch(model).items())
        [('attention', 1), ('linear', 8), ('loss', 1), ('mlp', 1), ('norm', 3), ('rope', 1)]
        >>> unpatch(model)
    """
    wanted: dict[str, bool] = packed("patch", Chosen, options)._asdict()
    for name, value in wanted.items():
        require_bool("omniattn.hf.patch", name, value)
    inner = _unwrap(model)
    if isinstance(inner, OmniattnForCausalLM):
        _log.info("patch: OmniattnForCausalLM runs on this package's ops as it is")
        return {}
    if is_patched(inner):
        raise ValueError("omniattn.hf.patch: model must not be patched already")
    if any(p.is_meta for p in inner.parameters()):
        raise ValueError("omniattn.hf.patch: weights must be loaded, got some on the meta device")
    finders = {name: find for name, find in FINDERS.items() if wanted[name]}
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
            module.__class__ = subclass(kind, found)
            count[name] += found not in _OUTER
    packs = wanted["mixer"] and any(map(_mixes_tokens, inner.modules()))
    model_kind: Any = type(inner)
    forward = (packed_causal_lm_forward if packs else causal_lm_forward)(model_kind)
    if wanted["loss"] and forward is not None and inner.loss_function is ForCausalLMLoss:
        inner.loss_function = causal_lm_loss
        count["loss"] = 1
        if wanted["linear_cross_entropy"]:
            left.extend(_defer_logits(inner, forward))
    if packs:
        left.extend(_keep_sequences_apart(inner))
    for name, module, why_not in _set_interfaces(inner, wanted["attention"], wanted["experts"]):
        if why_not is None:
            count[name] += 1
        else:
            left.append((name, module, Left(why_not, logging.WARNING)))
    lines = Counter((each.level, name, type(m).__name__, each.reason) for name, m, each in left)
    for (level, name, kind, reason), times in lines.items():
        _log.log(level, "patch: %s: %d %s unchanged: %s", name, times, kind, reason)
    return dict(count)


def _defer_logits(
    model: PreTrainedModel, forward: Forward
) -> Iterator[tuple[str, nn.Module, Left]]:
    """Makes the model's head compute the loss; otherwise yields the model and the reason."""
    made: Any = model.get_output_embeddings()
    wrapped = getattr(made, "modules_to_save", None)  # PEFT's wrapper of a fully trained head
    heads = [made] if wrapped is None else [made.original_module, *wrapped.values()]
    kind: Any = type(model)
    head_kind = _unpatched(made)
    if "forward" in model.__dict__:
        reason = "its forward was replaced on the instance"
    elif not all(map(_is_linear, heads)):
        own = " with a forward of its own" if head_kind is nn.Linear else ""
        reason = f"its head is a {head_kind.__module__}.{head_kind.__name__}{own}"
    else:
        for each in heads:
            ours = hasattr(type(each), "omniattn_original")
            each.__class__ = subclass(_unpatched(each), head if ours else plain_head)
        model.__class__ = subclass(kind, forward)
        name = kind.__name__
        _log.info("patch: loss: %s makes no logits in training but with skip_logits=False", name)
        return
    yield "loss", model, Left(f"it makes logits: {reason}", logging.WARNING)


def _keep_sequences_apart(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Left]]:
    """Makes parts of a model with recurrent layers store the packing of each call; yields parts
    that cannot, with the reason."""
    for part in _pretrained_parts(model):
        layers = list(part.modules())
        if not any(map(_mixes_tokens, layers)):
            continue
        if "forward" in part.__dict__:
            reason = "it passes on no boundaries of packed sequences: its forward was replaced"
            yield "mixer", part, Left(reason, logging.WARNING)
        for module in (part, *layers):
            kind: Any = type(module)
            if "forward" in module.__dict__ or hasattr(kind, "omniattn_original"):
                continue
            if module is part:
                module.__class__ = subclass(kind, model_forward(kind))
            elif isinstance(module, GradientCheckpointingLayer):
                module.__class__ = subclass(kind, recomputed_forward(kind))


def _is_recurrent(module: Any) -> bool:
    kind: Any = type(module)
    return hasattr(kind, "omniattn_original") and kind.forward is recurrent_forward(
        _unpatched(module)
    )


def _mixes_tokens(module: nn.Module) -> bool:
    """Returns True if `module` is a recurrent layer, patched or with code of its own."""
    return _is_recurrent(module) or type(module).__name__ in OTHER_MIXERS


def _is_linear(module: Any) -> bool:
    """Returns True if a head is equivalent to nn.Linear."""
    return (
        isinstance(module, nn.Linear)
        and _unpatched(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
    )


def _set_interfaces(
    model: PreTrainedModel, attention: bool, experts: bool
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Sets the implementations of `model`; yields each attention and experts layer with None, or
    with the reason why it does not run on this package."""
    layers = list(filter(asks_for_attention, model.modules())) if attention else []
    # A composite model with such a part rejects another implementation's name.
    own = next(filter(None, map(own_attention, _pretrained_parts(model))), None)
    mixtures = [m for m in model.modules() if hasattr(m, "has_post_expert_norm")] if experts else []
    unsupported = next(filter(None, map(why_unsupported, mixtures)), None)
    if layers or (mixtures and not unsupported):
        register()
        for part in _pretrained_parts(model):
            # transformers searches the source file of a class for its interfaces and caches the
            # result on the class; for a class made by fully_shard it would search torch's file.
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
    for other in other_attention(model) if attention else ():
        if not any(map(_runs_on_ours, other.modules())):
            yield "attention", other, "it does not ask transformers' AttentionInterface"
    for mixture in mixtures:
        yield "experts", mixture, unsupported or why_not(mixture, "_experts_implementation")


def _runs_on_ours(module: Any) -> bool:
    """Returns True if `module` is a patched attention, or a patched recurrent layer named so."""
    kind: Any = type(module)
    swapped = hasattr(kind, "omniattn_original") and kind.forward in ATTENTIONS
    return swapped or _is_recurrent(module)


def unpatch(model: nn.Module) -> None:
    """Undoes :func:`patch`; an unpatched model stays unchanged."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"omniattn.hf.unpatch: model must be a torch.nn.Module, got model={shown(model)}"
        )
    for module in model.modules():
        if hasattr(type(module), "omniattn_original"):
            module.__class__ = _unpatched(module)
        if module.__dict__.get("_loss_function") is causal_lm_loss:
            del module._loss_function
        module.__dict__.pop("omniattn_defers", None)
    for part in _pretrained_parts(model):
        for name, before in part.__dict__.pop("_omniattn_before", {}).items():
            setattr(part.config, name, before)


def _unpatched(module: Any) -> Any:
    kind: Any = type(module)
    return original_of(kind)


def is_patched(model: nn.Module) -> bool:
    """Returns True if :func:`patch` has replaced anything in a model."""
    return any(
        hasattr(type(module), "omniattn_original") or "_omniattn_before" in module.__dict__
        for module in model.modules()
    )


def _pretrained_parts(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _unwrap(model: Any) -> PreTrainedModel:
    """Returns the transformers model inside any nesting of DDP, torch.compile and PEFT."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile's; importing its class takes seconds
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # PEFT's
            inner = inner.get_base_model()
        else:
            raise TypeError(
                f"omniattn.hf.patch: model must be a PreTrainedModel, got {type(model).__name__}"
            )
    return inner
