"""Settings of NATTEN's kernels, kept for programs that read them; none changes a result here."""

from __future__ import annotations

from enum import Enum

from omniattn.checks.arguments import require_choice
from omniattn.compat._errors import require_flags


class MemoryUsagePreference(Enum):
    """Limits of the memory that NATTEN's backward may take."""

    Default = 0
    Strict = 1
    Unrestricted = 2


class NattenContext:
    """Values of the settings."""

    is_deterministic_mode_enabled = False
    is_kv_parallelism_enabled = True
    training_memory_preference = MemoryUsagePreference.Default
    flex_compile_allowed = False
    flex_compile_backprop_allowed = False

    @staticmethod
    def reset() -> None:
        NattenContext.is_deterministic_mode_enabled = False
        NattenContext.is_kv_parallelism_enabled = True
        NattenContext.training_memory_preference = MemoryUsagePreference.Default
        NattenContext.flex_compile_allowed = False
        NattenContext.flex_compile_backprop_allowed = False


def use_deterministic_algorithms(mode: bool = True) -> None:
    """Has no effect, since results are always deterministic."""
    require_flags("use_deterministic_algorithms", mode=mode)
    NattenContext.is_deterministic_mode_enabled = mode


def are_deterministic_algorithms_enabled() -> bool:
    """Returns the mode that :func:`use_deterministic_algorithms` set."""
    return NattenContext.is_deterministic_mode_enabled


def use_kv_parallelism_in_fused_na(mode: bool = True) -> None:
    """Has no effect, since results are always deterministic."""
    require_flags("use_kv_parallelism_in_fused_na", mode=mode)
    NattenContext.is_kv_parallelism_enabled = mode


def is_kv_parallelism_in_fused_na_enabled() -> bool:
    """Returns the mode that :func:`use_kv_parallelism_in_fused_na` set."""
    return NattenContext.is_kv_parallelism_enabled


def set_memory_usage_preference(pref: str = "default") -> None:
    """Has no effect, since the backward needs no memory for each tile of keys."""
    choices = {p.name.lower(): p for p in MemoryUsagePreference}
    require_choice("set_memory_usage_preference", "pref", pref, choices)
    NattenContext.training_memory_preference = choices[pref]


def get_memory_usage_preference() -> MemoryUsagePreference:
    """Returns the preference that :func:`set_memory_usage_preference` set."""
    return NattenContext.training_memory_preference


def is_memory_usage_default() -> bool:
    """Returns True for the preference "default"."""
    return get_memory_usage_preference() == MemoryUsagePreference.Default


def is_memory_usage_strict() -> bool:
    """Returns True for the preference "strict"."""
    return get_memory_usage_preference() == MemoryUsagePreference.Strict


def is_memory_usage_unrestricted() -> bool:
    """Returns True for the preference "unrestricted"."""
    return get_memory_usage_preference() == MemoryUsagePreference.Unrestricted


def allow_flex_compile(mode: bool = True, backprop: bool = False) -> None:
    """Has no effect, since no kernel is compiled at run time."""
    require_flags("allow_flex_compile", mode=mode, backprop=backprop)
    NattenContext.flex_compile_allowed = mode
    NattenContext.flex_compile_backprop_allowed = backprop


def allow_flex_compile_backprop(mode: bool = True) -> None:
    """Has no effect, since no kernel is compiled at run time."""
    require_flags("allow_flex_compile_backprop", mode=mode)
    NattenContext.flex_compile_backprop_allowed = mode


def disable_flex_compile() -> None:
    """Has no effect, since no kernel is compiled at run time."""
    allow_flex_compile(False, False)


def disable_flex_compile_backprop() -> None:
    """Has no effect, since no kernel is compiled at run time."""
    allow_flex_compile_backprop(False)


def is_flex_compile_allowed() -> bool:
    """Returns the mode that :func:`allow_flex_compile` set."""
    return NattenContext.flex_compile_allowed


def is_flex_compile_backprop_allowed() -> bool:
    """Returns the mode that :func:`allow_flex_compile_backprop` set."""
    return NattenContext.flex_compile_backprop_allowed
