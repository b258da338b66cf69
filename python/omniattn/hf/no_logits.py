"""Placeholder for logits that a call did not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["NO_LOGITS", "NoLogits", "missing_logits"]


class NoLogits:
    """Replaces logits that were not computed, and raises when used.

    It is a singleton, also after copying, pickling and in pytrees. Attribute access raises
    AttributeError, so that libraries that look for tensors with `hasattr` get False.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_message(f"logits.{name}"))

    def __repr__(self) -> str:
        return "NO_LOGITS"

    def __reduce__(self) -> str:
        return "NO_LOGITS"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_message("an array of logits"))

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_message(f"{getattr(func, '__name__', func)}(logits)"))


def _message(use: str) -> str:
    return (
        "omniattn.hf: the model must be called with skip_logits=False to make logits as well as "
        f"its loss, got {use}"
    )


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(_message(f"{name} of logits"))

    return refuse


# Python looks operators up in the class, not through __getattr__.
for _name in (
    *("bool", "len", "iter", "next", "contains", "getitem", "setitem", "delitem", "eq", "ne", "lt"),
    *("le", "gt", "ge", "neg", "pos", "abs", "invert", "int", "float", "complex", "index", "round"),
    *("call", "enter", "exit"),
    *(
        prefix + each
        for prefix in ("", "r", "i")
        for each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    ),
    *(prefix + each for prefix in ("", "r", "i") for each in ("and", "or", "xor")),
):
    setattr(NoLogits, f"__{_name}__", _refusal(f"__{_name}__"))
NoLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

NO_LOGITS = NoLogits()


def missing_logits(model: object) -> NoLogits | None:
    """Returns the logits of a call of `model` that computed none."""
    # DataParallel's gather supports only tensors and None.
    return None if getattr(model, "_is_replica", False) else NO_LOGITS
