"""Registers attn_implementation="omniattn" and experts_implementation="omniattn"."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from omniattn.hf.attention.attention import attention_forward
from omniattn.hf.attention.masks import attention_mask
from omniattn.hf.attention.paged import accept_continuous_batching
from omniattn.hf.common.interface import own_attention
from omniattn.hf.patching.experts import experts_forward

__all__ = ["register"]


def register(name: str = "omniattn") -> None:
    """Registers attention, masks and experts under `name`.

    Attention needs the mask function, too: without it a model would get no mask and silently lose
    causality.

    Args:
        name: for `from_pretrained(..., attn_implementation=name, experts_implementation=name)`,
            `from_config`, `model.set_attn_implementation(name)` and
            `model.set_experts_implementation(name)`. Continuous batching (`generate_batch`) takes
            it as well; transformers reads "paged|omniattn" as "omniattn".

    Note:
        A model that computes its attention without transformers' AttentionInterface (BLOOM, MPT,
        DeBERTa, Falcon) would accept the name and ignore it, or raise KeyError. It raises
        NotImplementedError instead, when constructed and in `set_attn_implementation`. A layer that
        passes an unsupported argument, such as the cache of a kernel, raises it in its forward.
        docs/hf.md has the list.

    Example:
        >>> from transformers import AttentionInterface
        >>> register()
        >>> "omniattn" in AttentionInterface()
        True
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    _check_models()
    accept_continuous_batching(_is_ours)


@functools.cache
def _check_models() -> None:
    """Makes every model check that it supports our attention; transformers has no hook for it."""
    kind: Any = PreTrainedModel
    correct, change = kind.get_correct_attn_implementation, kind.set_attn_implementation

    @functools.wraps(correct)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if _is_ours(requested_attention):
            require_interface(self)
        result: str = correct(self, requested_attention, is_init_check)
        return result

    @functools.wraps(change)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        requested = {id(c): name for c, name in _requested(self.config, attn_implementation)}
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and _is_ours(
                requested.get(id(part.config), requested[id(self.config)])
            ):
                require_interface(part)
        change(self, attn_implementation, *args, **kwargs)

    kind.get_correct_attn_implementation = get_correct_attn_implementation
    kind.set_attn_implementation = set_attn_implementation


def _is_ours(name: str | None) -> bool:
    if name is None:
        return False
    return AttentionInterface().get(name.removeprefix("paged|")) is attention_forward


def _requested(
    config: PreTrainedConfig, implementation: str | dict[str, Any]
) -> Iterator[tuple[PreTrainedConfig, str]]:
    """Yields each config with the implementation that `set_attn_implementation` will set."""
    if not isinstance(implementation, dict):
        implementation = dict.fromkeys(("", *config.sub_configs), implementation)
    yield config, implementation.get("", config._attn_implementation)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _requested(part, implementation.get(name, part._attn_implementation))


def require_interface(model: PreTrainedModel) -> None:
    """Raises NotImplementedError for a model that never uses the AttentionInterface.

    Args:
        model: checked without the models nested in it.
    """
    layer = own_attention(model)
    if layer is not None:
        own = "sdpa" if model._supports_sdpa else "eager"
        swaps = "which swaps its calls of sdpa" if own == "sdpa" else "if it has such layers"
        raise NotImplementedError(
            f"omniattn.hf: {type(model).__name__} computes its attention itself ({layer}) and "
            f'never asks the AttentionInterface of transformers; use attn_implementation="{own}" '
            f"and omniattn.hf.patch, {swaps}, or, for other parts of a composite model, "
            f'{{"": "{own}", "text_config": "omniattn"}}'
        )
