"""What all layers that are built from a `Config` have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


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
