"""The object in place of logits that a call did not make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["NO_LOGITS", "NoLogits"]


class NoLogits:
    """Stands in an output for logits that were left out, and raises where it is used.

    There is one instance, which copies, pickles and trees of tensors keep. Attributes that are
    looked up raise AttributeError, so that `hasattr`, by which libraries look for tensors in an
    output, answers False.
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


# Python looks these up in the class, not by __getattr__.
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
