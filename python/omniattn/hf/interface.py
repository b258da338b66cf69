"""Finds the models and layers that ask transformers' AttentionInterface for their attention."""

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
    """Whether `module` looks up its attention by transformers' AttentionInterface."""
    kind: Any = type(module)
    return _asks(kind)


def other_attention(module: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules that are named an attention and in which no module asks for it."""
    if asks_for_attention(module):
        return
    inner = [other for child in module.children() for other in other_attention(child)]
    yield from inner
    if inner or "Attention" not in type(module).__name__:
        return
    if not any(map(asks_for_attention, module.modules())):
        yield module


def own_attention(model: PreTrainedModel) -> str | None:
    """How a model computes attention if it never asks; models inside it do not count."""
    kind: Any = type(model)
    return _own_layer(kind) or _own_table(kind)


@functools.cache
def _own_layer(kind: type[PreTrainedModel]) -> str | None:
    """The attention layer of a modeling file in which no layer asks the AttentionInterface."""
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
    """The dict from which a model takes attention layers by the name of the implementation."""
    scope = vars(sys.modules[kind.__module__])
    if not any(name.endswith("_ATTENTION_CLASSES") for name in scope):
        return None
    parts: list[type] = [kind]
    for part in parts:  # grows by the layers that the code of a part names
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
    """Whether a method of a module's class uses transformers' table, PreTrainedModel's excepted."""
    own = [base for base in kind.__mro__ if base not in PreTrainedModel.__mro__]
    methods = [inspect.unwrap(x) for base in own for x in vars(base).values() if callable(x)]
    codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)
