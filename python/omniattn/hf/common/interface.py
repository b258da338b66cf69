"""Finds models and layers that dispatch attention through transformers' AttentionInterface."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

__all__ = ["asks_for_attention", "other_attention", "own_attention"]


def asks_for_attention(module: nn.Module) -> bool:
    """Returns True if `module` looks up its attention in transformers' AttentionInterface."""
    kind: Any = type(module)
    return _asks(kind)


def other_attention(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the innermost modules named "Attention" in which no module uses the interface."""
    if asks_for_attention(module):
        return
    inner = [other for child in module.children() for other in other_attention(child)]
    yield from inner
    if inner or "Attention" not in type(module).__name__:
        return
    if not any(map(asks_for_attention, module.modules())):
        yield module


def own_attention(model: PreTrainedModel) -> str | None:
    """Names a model's attention code if it never uses the interface; ignores nested models."""
    kind: Any = type(model)
    return _own_layer(kind) or _own_table(kind)


@functools.cache
def _own_layer(kind: type[PreTrainedModel]) -> str | None:
    """Names the attention layer of a modeling file without uses of the AttentionInterface."""
    for base in kind.__mro__[: kind.__mro__.index(PreTrainedModel)]:
        scope = vars(sys.modules[base.__module__])
        layers = {
            name: value
            for name, value in scope.items()
            if _is_layer(value) and value.__module__ == base.__module__
        }
        if any(map(_asks, layers.values())):
            continue
        for name in layers:
            if "Attention" in name:
                return name
    return None


@functools.cache
def _own_table(kind: type[PreTrainedModel]) -> str | None:
    """Names the dict from which a model selects attention layers by implementation name."""
    scope = vars(sys.modules[kind.__module__])
    if not any(name.endswith("_ATTENTION_CLASSES") for name in scope):
        return None
    parts: list[type] = [kind]
    for part in parts:  # grows by the layers that a part's code refers to
        for name in re.findall(r"\w+", inspect.getsource(part)):
            if name.endswith("_ATTENTION_CLASSES"):
                return name
            layer: Any = scope.get(name)
            if _is_layer(layer) and layer not in parts and not issubclass(layer, PreTrainedModel):
                parts.append(layer)
    return None


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


@functools.cache
def _asks(kind: Any) -> bool:
    """Returns True if a method of the class, PreTrainedModel's excepted, uses the interface."""
    own = [base for base in kind.__mro__ if base not in PreTrainedModel.__mro__]
    methods = [inspect.unwrap(x) for base in own for x in vars(base).values() if callable(x)]
    codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)
