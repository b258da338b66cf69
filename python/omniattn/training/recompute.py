"""Activation checkpointing of the blocks of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omniattn.checks.arguments import shown

#: Arguments with a cache, which a second forward would write again.
_CACHES = ("state", "cache", "past_key_values", "past_key_value")


@contextmanager
def recompute_blocks(model: nn.Module) -> Iterator[None]:
    """Saves memory: forwards in this context keep only the input of each block for the backward.

    The backward computes the rest again, with the same dropout, so that losses and gradients keep
    their bits. A training step takes about a third longer. Blocks are the items of the model's
    outermost ModuleLists, of any class. Without gradients the blocks run as usual.

    Args:
        model: a model of this package or another one with its blocks in ModuleLists. The backward
            may run after the context.

    Raises:
        ValueError: the model has no blocks.
        NotImplementedError: a block is called with a cache.

    Reference:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.

    Example:
        >>> from omniattn.models import PRESETS
        >>> model, tokens = PRESETS["llama-test"].build(), torch.zeros(1, 8, dtype=torch.long)
        >>> with recompute_blocks(model):
        ...     loss = model(tokens, tokens)
        >>> loss.backward()
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise ValueError(
            "recompute_blocks: model must have blocks in a ModuleList, "
            f"got {type(model).__name__} without any"
        )
    own = [vars(block).get("forward") for block in blocks]  # of a patched block
    for block in blocks:
        block.forward = _recomputed(block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the items of the outermost ModuleLists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for name in _CACHES:
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"recompute_blocks: {name} must be None with gradients, "
                    f"got {name}={shown(kwargs[name])}"
                )
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
