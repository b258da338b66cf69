"""The mask function of attn_implementation="omniattn".

transformers describes a mask as a Python predicate on (batch, head, query, key). The predicates of
its masking_utils are recognised and become mask rules, with which the kernels skip masked tiles.
Any other predicate becomes the bool tensor of transformers' sdpa_mask: correct but slower.

Some modules outside attention read the mask as well: NLLB-MoE's router, the compressor of
DeepSeek-V4, the convolutions of Nemotron ASR. They see the mask that transformers makes by default:
the bool mask of sdpa_mask or, for models without sdpa support, the additive mask of eager
attention.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from omniattn.functional import masks

__all__ = ["RuleMask", "attention_mask"]

Predicate = Callable[..., Any]


class RuleMask(torch.Tensor):
    """A mask (B, 1, Tq, Tk) stored as rules.

    `omniattn.hf` reads `rules`, which apply to the first `keys` keys; later keys are masked. Any
    other operation, such as a model's combination of masks, sees a plain tensor of `dtype`.
    """

    rules: masks.Mask
    keys: int
    _visible: Callable[[], Any]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        rules: masks.Mask,
        keys: int,
        visible: Callable[[], Any],
    ) -> RuleMask:
        self: RuleMask = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device(device)
        )
        self.rules = rules
        self.keys = keys
        self._visible = visible
        return self

    def visible(self) -> Tensor:
        """Returns the mask as a plain bool tensor; True is visible."""
        seen: Tensor = self._visible()
        return seen

    def dense(self) -> Tensor:
        """Returns the mask as a plain tensor, bool or additive."""
        return _as_dtype(self.visible(), self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes the contents
        return f"RuleMask({tuple(self.shape)}, {self.rules}, keys={self.keys})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a function that says no
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(RuleMask, RuleMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **_: Any,
) -> Tensor | None:
    """Returns the mask of one forward pass; takes the arguments of transformers' mask functions.

    Returns:
        A RuleMask. Under torch.compile and torch.export, None for a plain causal mask, otherwise
        the dense mask (B, 1, Tq, Tk).

    Raises:
        ValueError: the padding mask is not (B, T).
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "omniattn.hf: attention_mask must have shape (B, T) or (B, H, Tq, Tk), "
            f"got attention_mask.shape={tuple(attention_mask.shape)}"
        )

    # Never skipped: None would be ambiguous between causal and bidirectional.
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    dtype = torch.bool if _knows_sdpa(config) else dtype
    if torch.compiler.is_compiling():
        made: Any = sdpa_mask(
            **given, allow_is_causal_skip=allow_is_causal_skip, local_size=local_size
        )
        return made if made is None else _as_dtype(made, dtype)
    if isinstance(q_offset, Tensor):  # a static cache's counter, updated in place
        given["q_offset"] = q_offset.clone()
    visible: Callable[[], Any] = functools.partial(sdpa_mask, **given, allow_is_causal_skip=False)
    rules, keys = _aligned_rules(q_length, kv_length, q_offset, kv_offset, mask_function, use_vmap)
    if rules is None:
        seen = visible()
        rules, visible = [masks.BoolMask(seen)], lambda: seen
    elif (padding := prepare_padding_mask(attention_mask, kv_length, kv_offset)) is not None:
        rules += _padding(padding[:, kv_offset : kv_offset + keys].bool())
    shape = (batch_size, 1, q_length, kv_length)
    return RuleMask(shape, dtype, device, masks.All(tuple(rules)), keys, visible)


def _knows_sdpa(config: PreTrainedConfig | None) -> bool:
    """Returns True if a config's models accept bool masks."""
    modeling = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return modeling is None or all(
        kind._supports_sdpa
        for kind in vars(modeling).values()
        if isinstance(kind, type)
        and issubclass(kind, PreTrainedModel)
        and isinstance(config, kind.config_class or ())
    )


def _as_dtype(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a bool mask unchanged, or converted to eager attention's additive bias."""
    if dtype == torch.bool:
        return visible
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def _aligned_rules(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    predicate: Predicate,
    use_vmap: bool,
) -> tuple[list[masks.Mask] | None, int]:
    """Returns a predicate's rules, or None if it has none, and the number of keys they apply to."""
    rules = None if use_vmap else _rules(predicate)
    if rules is None or (kv_offset and any(isinstance(rule, masks.Chunked) for rule in rules)):
        return None, kv_length
    # The rules align the last query with the last key. Later keys, in the unfilled part of a static
    # cache, are cut off, which only a causal mask allows.
    last = int(q_offset) + q_length - kv_offset
    causal = any(isinstance(rule, masks.Causal) for rule in rules)
    keys = last if causal else kv_length
    aligned = last == keys or not rules
    return (rules, keys) if aligned and 0 < keys <= kv_length else (None, kv_length)


def _rules(predicate: Predicate) -> list[masks.Mask] | None:
    """Returns the rules of a predicate of transformers.masking_utils, or None if unknown."""
    if predicate is causal_mask_function:
        return [masks.Causal()]
    if predicate is bidirectional_mask_function:
        return []
    if getattr(predicate, "__module__", None) != causal_mask_function.__module__:
        return None
    maker, _, inner = predicate.__qualname__.partition(".<locals>.")
    cells = predicate.__closure__ or ()
    values = {
        name: cell.cell_contents
        for name, cell in zip(predicate.__code__.co_freevars, cells, strict=True)
    }
    match maker, inner, values:
        case "and_masks", "and_mask", {"mask_functions": tuple(parts)}:
            return _packed(*parts) if _is_packed(parts) else _all(parts)
        case "sliding_window_overlay", "inner_mask", {"sliding_window": int(size)} if size > 0:
            return [masks.SlidingWindow(size - 1, -1)]
        case "sliding_window_bidirectional_overlay", "inner_mask", {"sliding_window": int(size)}:
            return [masks.SlidingWindow(size, size)]
        case "chunked_overlay", "inner_mask", {"chunk_size": int(size), "left_padding": left}:
            return None if left.any() else [masks.Chunked(size, causal=False)]
    return None


def _all(parts: tuple[Predicate, ...]) -> list[masks.Mask] | None:
    found = [_rules(part) for part in parts]
    if any(rules is None for rules in found):
        return None
    return [rule for rules in found if rules is not None for rule in rules]


#: Names of the predicates of packed sequences; their order depends on transformers' version.
_SAME = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


def _is_packed(parts: tuple[Predicate, ...]) -> bool:
    """Returns True if the predicates describe packed sequences."""
    return sorted(part.__qualname__ for part in parts) == [_SAME, _REMAPPED]


def _packed(*parts: Predicate) -> list[masks.Mask] | None:
    """Returns the rules of packed sequences; within one, position and index differences agree."""
    same, remapped = sorted(parts, key=lambda part: part.__qualname__)
    (sequence,) = (cell.cell_contents for cell in same.__closure__ or ())
    cells = dict(zip(remapped.__code__.co_freevars, remapped.__closure__ or (), strict=True))
    rules = _rules(cells["mask_function"].cell_contents)
    if rules is None or any(isinstance(rule, masks.Chunked) for rule in rules):
        return None  # chunks restart with each sequence
    return [masks.Documents(sequence), *rules]


def _padding(real: Tensor) -> list[masks.Mask]:
    """Returns the rule of a padding mask (B, T), or no rule if nothing is padded."""
    if real.all():
        return []
    if bool((real[:, 1:] <= real[:, :-1]).all()):
        return [masks.KeyLengths(real.sum(1))]
    return [masks.KeyPadding(real)]
