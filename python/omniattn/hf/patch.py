"""Swaps the layers of one transformers model for this package's kernels, and back."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from omniattn import functional
from omniattn.hf.experts import is_supported
from omniattn.hf.register import register

__all__ = ["patch", "unpatch"]

Forward = Callable[..., Any]


def patch(
    model: PreTrainedModel,
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
    what they compute: each is run on a probe, and swapped if ours gives the same.

    A patched model can be pickled: by torch.save as a whole, or to a process that is spawned. Where
    `attention` or `experts` alone were patched, that process has to call :func:`register` first.

    Args:
        model: of transformers, weights loaded.
        attention: set its attention implementation, if it asks for one.
        linear: nn.Linear.
        norm: RMSNorm in its spellings, and LayerNorm.
        mlp: down_proj(act(gate_proj(x)) * up_proj(x)); the same with one gate_up_proj (Phi-3,
            GLM-4); wo(dropout(act(wi_0(x)) * wi_1(x))) (T5 v1.1). act: SiLU, GELU, tanh GELU, ReLU.
        rope: apply_rotary_pos_emb of attention layers, half-split or interleaved (Cohere, GLM-4),
            with the heads before or behind the tokens, as unsqueeze_dim says.
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
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"omniattn.hf.patch: model must be a PreTrainedModel, got {type(model).__name__}"
        )
    if any(_is_patched(module) for module in model.modules()):
        raise ValueError("omniattn.hf.patch: model must not be patched already")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("omniattn.hf.patch: weights must be loaded, got some on the meta device")
    finders: list[tuple[str, Callable[[nn.Module], Forward | None]]] = []
    if linear:
        finders.append(("linear", _find_linear))
    if norm:
        finders.append(("norm", _find_norm))
    if mlp:
        finders.append(("mlp", _find_mlp))
    if rope:
        finders.append(("rope", _find_rotary))
    count: Counter[str] = Counter()
    found = [
        (module, name, forward)
        for module in model.modules()
        for name, find in finders
        if (forward := find(module)) is not None
    ]
    for module, name, forward in found:
        kind: Any = type(module)
        module.__class__ = _subclass(kind, forward)
        count[name] += 1
    if loss and model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_lm_loss
        count["loss"] = 1
    attention = attention and type(model)._can_set_attn_implementation()
    mixtures = _find_experts(model) if experts else []
    if attention or mixtures:
        register()
        for part in _pretrained_parts(model):
            part.__dict__["_omniattn_before"] = {
                name: getattr(part.config, name)
                for name in ("_attn_implementation", "_experts_implementation")
            }
    if attention:
        model.set_attn_implementation("omniattn")
        count["attention"] = 1
    if mixtures:
        model.set_experts_implementation("omniattn")
        count["experts"] = len(mixtures)
    return dict(count)


def unpatch(model: PreTrainedModel) -> None:
    """Undoes :func:`patch`; a model that is not patched stays as it is."""
    for module in model.modules():
        original = getattr(type(module), "omniattn_original", None)
        if original is not None:
            module.__class__ = original
    if model.__dict__.get("_loss_function") is causal_lm_loss:
        del model._loss_function
    for part in _pretrained_parts(model):
        for name, before in part.__dict__.pop("_omniattn_before", {}).items():
            setattr(part.config, name, before)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss without its fp32 copy of the logits."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = functional.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return total
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _is_patched(module: nn.Module) -> bool:
    return hasattr(type(module), "omniattn_original") or "_omniattn_before" in module.__dict__


def _pretrained_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@functools.cache
def _subclass(original: Any, forward: Forward) -> Any:
    """`original` with another forward. No state on the instance: copies stay right."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # A rotary forward is made anew from the class; all others are functions of this file.
        named = None if forward is _rotary_forward(original) else forward
        state = original.__reduce_ex__(self, max(protocol, 2))[2]
        return _patched_instance, (original, named), state

    body = {
        "forward": forward,
        "omniattn_original": original,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
    }
    return type(original.__name__, (original,), body)


def _patched_instance(original: Any, forward: Forward | None) -> Any:
    """An empty module of the subclass, for pickle; the process may not have patched anything."""
    register()
    kind = _subclass(original, _rotary_forward(original) if forward is None else forward)
    return kind.__new__(kind)


def _find_experts(model: PreTrainedModel) -> list[nn.Module]:
    """All modules of the experts interface; none where this package lacks a form of them."""
    if not type(model)._can_set_experts_implementation():
        return []
    found = [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]
    return found if all(map(is_supported, found)) else []


def _find_linear(module: nn.Module) -> Forward | None:
    return _linear_forward if type(module) is nn.Linear else None


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight, self.bias)


def _eps(module: Any) -> float:
    """eps of a norm, NaN if it has none."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return math.nan


def _norm_forward(norm: Forward) -> Forward:
    @functools.wraps(norm)
    def forward(self: Any, x: Tensor) -> Any:
        # Models that keep a stream in fp32 beside half weights mix dtypes, which our norms do not.
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return self.omniattn_original.forward(self, x)
        return norm(self, x)

    return forward


@_norm_forward
def _rms_norm(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=_eps(self))


@_norm_forward
def _rms_norm_llama(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=_eps(self), casting="llama")


@_norm_forward
def _rms_norm_gemma(self: Any, x: Tensor) -> Any:
    return functional.rms_norm(x, self.weight, eps=_eps(self), offset=1.0)


@_norm_forward
def _layer_norm(self: Any, x: Tensor) -> Any:
    return functional.layer_norm(x, self.weight, getattr(self, "bias", None), eps=_eps(self))


_NORMS = (_rms_norm, _rms_norm_llama, _rms_norm_gemma, _layer_norm)


def _find_norm(module: nn.Module) -> Forward | None:
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    # FalconMamba's norm without a weight has ones in a buffer of that name.
    if not name.endswith(("RMSNorm", "LayerNorm")) or not isinstance(weight, nn.Parameter):
        return None
    if weight.dim() != 1 or math.isnan(_eps(module)):
        return None
    return _same(module, _NORMS, weight.shape[0], weight)


def _mlp(self: Any, x: Tensor, glu: Callable[..., Tensor]) -> Any:
    """A gated MLP with projections of one of the names in _MLP_PARTS."""
    if hasattr(self, "gate_proj"):
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x)))
    if hasattr(self, "gate_up_proj"):
        return self.down_proj(glu(self.gate_up_proj(x)))
    hidden = self.dropout(glu(self.wi_0(x), self.wi_1(x)))
    return self.wo(hidden.to(self.wo.weight.dtype))  # T5 may keep wo in fp32


def _swiglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.swiglu)


def _geglu_tanh_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functools.partial(functional.geglu, approximate="tanh"))


def _geglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.geglu)


def _reglu_mlp(self: Any, x: Tensor) -> Any:
    return _mlp(self, x, functional.reglu)


_MLPS = (_swiglu_mlp, _geglu_tanh_mlp, _geglu_mlp, _reglu_mlp)
#: The projections of a gated MLP: of the gate and up, or of both at once, and down; T5's dropout.
_MLP_PARTS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("wi_0", "wi_1", "wo", "dropout"),
)


def _find_mlp(module: nn.Module) -> Forward | None:
    for names in _MLP_PARTS:
        parts: list[Any] = [getattr(module, name, None) for name in names]
        if any(type(part) not in (nn.Linear, nn.Dropout) for part in parts):
            continue
        if len(inspect.signature(type(module).forward).parameters) != 2:
            return None  # more than self and x, as the adapters of Zamba 2
        return _same(module, _MLPS, parts[0].in_features, parts[0].weight)
    return None


def _same(
    module: nn.Module, candidates: Sequence[Forward], size: int, like: Tensor
) -> Forward | None:
    """The candidate that computes what `module` does in training, the closest where several do,
    None if there is none or `module` takes no rows (norms over channels in front, I-BERT's)."""
    generator = torch.Generator().manual_seed(0)
    # Off centre to tell RMSNorm from LayerNorm; small rows to tell one eps from another.
    x = torch.randn(8, size, generator=generator) + 0.5
    x[4:] *= 1e-3
    x = x.to(like.device, like.dtype)
    tolerance = 20 * torch.finfo(like.dtype).eps
    flags = [(part, part.training) for part in module.modules()]

    def run(forward: Forward, *inputs: Any) -> Tensor:
        torch.manual_seed(0)  # so that dropout in the same place drops the same
        y: Tensor = forward(*inputs)
        return y

    try:
        module.train()  # so that dropout shows
        with torch.random.fork_rng(), torch.no_grad():
            try:
                expected = run(module, x)
            except (RuntimeError, ValueError, TypeError, IndexError):
                return None
            others = [run(each, module, x) for each in candidates]
    finally:
        for part, flag in flags:
            part.training = flag
    differences = [(other - expected).abs() for other in others]
    bound = tolerance * expected.abs().amax(-1)
    errors = [d.sum().item() if (d.amax(-1) <= bound).all() else math.inf for d in differences]
    best = min(range(len(errors)), key=errors.__getitem__)
    return candidates[best] if math.isfinite(errors[best]) else None


def _find_rotary(module: nn.Module) -> Forward | None:
    kind: Any = type(module)
    return _rotary_forward(kind)


@functools.cache
def _rotary_forward(kind: Any) -> Forward | None:
    """The forward of an attention layer with our rotary function in place of its module's."""
    forward, name = kind.forward, "apply_rotary_pos_emb"
    if not isinstance(forward, FunctionType):
        return None
    if [used for used in forward.__code__.co_names if used.startswith(name)] != [name]:
        return None  # none, or others beside it
    original = forward.__globals__.get(name)
    if original is None or list(inspect.signature(original).parameters)[:4] != list(_ROTARY):
        return None
    layout = _layout(forward, original)
    if layout is None:
        return None
    rotary = next((ours for ours in _ROTARIES if _same_rotary(original, ours, layout)), None)
    if rotary is None:
        return None
    # A copy of the function that finds another name; without __name__, by which torch.compile
    # would look globals up in the module.
    scope = {**forward.__globals__, name: rotary}
    scope.pop("__name__")
    copy = FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__module__ = forward.__module__
    return copy


_ROTARY = ("q", "k", "cos", "sin")
_LAYOUTS: tuple[dict[str, int], ...] = ({}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2})


def _layout(forward: FunctionType, original: Forward) -> dict[str, int] | None:
    """The unsqueeze_dim that the calls of `original` in `forward` have, if they do: 1 for heads
    (B, H, T, D), 2 for (B, T, H, D); None where they have others, or further arguments."""
    signature, found = inspect.signature(original), []
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except OSError:
        return None  # a forward without source
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != original.__name__:
            continue
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        given = signature.bind_partial(*call.args, **keywords).arguments
        others = {name: node for name, node in given.items() if name not in _ROTARY}
        found.append({name: getattr(node, "value", None) for name, node in others.items()})
    return next((each for each in _LAYOUTS if found and found == [each] * len(found)), None)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, D), or (B, T, H, D) for unsqueeze_dim=2, turned by cos, sin (B, T, Dr / 2)."""
    heads_first = unsqueeze_dim == 1
    q, k_or_none = functional.apply_rotary(
        q.transpose(1, 2) if heads_first else q,
        k.transpose(1, 2) if heads_first else k,
        cos,
        sin,
        interleaved=interleaved,
        backend="reference" if cos.requires_grad else None,  # LightGlue learns its tables
    )
    assert k_or_none is not None
    return (q.transpose(1, 2), k_or_none.transpose(1, 2)) if heads_first else (q, k_or_none)


def _once(table: Tensor) -> Tensor:
    """The first half of a table that holds all angles twice, one after the other."""
    return table[..., : table.shape[-1] // 2]


def _rotary_half(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos, sin, unsqueeze_dim)


def _rotary_half_twice(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, _once(cos), _once(sin), unsqueeze_dim)


def _rotary_pairs_twice(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, _once(cos), _once(sin), unsqueeze_dim, interleaved=True)


def _rotary_pairs_each(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos[..., ::2], sin[..., ::2], unsqueeze_dim, interleaved=True)


#: Our rotary functions, and how the tables that each takes hold the angles.
_ROTARIES: dict[Forward, Callable[[Tensor], Tensor]] = {
    _rotary_half_twice: lambda angles: torch.cat([angles, angles], -1),
    _rotary_half: lambda angles: angles,
    _rotary_pairs_twice: lambda angles: torch.cat([angles, angles], -1),
    _rotary_pairs_each: lambda angles: angles.repeat_interleave(2, -1),
}


def _same_rotary(original: Forward, ours: Forward, layout: dict[str, int]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 8, generator=generator)
    if layout.get("unsqueeze_dim") == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = _ROTARIES[ours](torch.randn(1, 3, 4, generator=generator))
    cos, sin = angles.cos(), angles.sin()
    try:
        expected = original(q, k, cos, sin, **layout)
    except (RuntimeError, ValueError):
        return False  # tables of another shape
    try:
        original(q, k, cos[:, 1:], sin[:, 1:], **layout)
    except (RuntimeError, ValueError):
        pass
    else:
        return False  # it lets prefix tokens pass (DINOv3)
    return all(
        torch.allclose(a, e, rtol=1e-5, atol=1e-6)
        for a, e in zip(ours(q, k, cos, sin, **layout), expected, strict=True)
    )
