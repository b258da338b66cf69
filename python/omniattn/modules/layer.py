"""What all layers that are built from a `Config` have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar

from torch import nn

from omniattn.functional.norm import CASTINGS

#: Ends of the names of sizes.
_SIZES = ("dim", "heads", "features", "rank")
#: Sizes of parts that a layer may lack.
_OPTIONAL = ("qk_nope_dim", "qk_rope_dim", "shared_hidden_dim")


@dataclass(frozen=True)
class LayerConfig:
    """What a layer is built from. Checks the fields that mean the same in all layers by name."""

    def __post_init__(self) -> None:
        op = type(self).__qualname__.removesuffix(".Config")
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None:
                continue
            least = 0 if name in _OPTIONAL else 1
            if name.endswith(_SIZES) and not (isinstance(value, Integral) and int(value) >= least):
                raise ValueError(
                    f"{op}: {name} must be an integer >= {least}, got {name}={value!r}"
                )
            if name.endswith("eps") and not 0 <= value < math.inf:
                raise ValueError(f"{op}: {name} must be finite and >= 0, got {name}={value}")
            if name == "casting" and value not in CASTINGS:
                raise ValueError(f"{op}: casting must be one of {CASTINGS}, got casting={value!r}")


class Layer(nn.Module):
    """A module whose first argument is a value of its nested class `Config`."""

    Config: ClassVar[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Before __init__ binds its arguments; copy and pickle pass none.
        given = (*args, *kwargs.values())
        if given and not any(isinstance(value, cls.Config) for value in given):
            name = cls.__name__
            sizes = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            raise TypeError(
                f"{name}: config must be a {name}.Config, got {sizes}; "
                f"write {name}({name}.Config({sizes}))"
            )
        return super().__new__(cls)
