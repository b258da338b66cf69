"""What all layers that are built from a `Config` have in common."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from omniattn.functional._checks import BACKENDS, require_number, require_pair
from omniattn.functional.norm import CASTINGS

if TYPE_CHECKING:
    from typing_extensions import Self

#: Ends of the names of sizes.
_SIZES = (
    *("dim", "heads", "features", "rank", "layers", "experts"),
    *("vocab_size", "positions", "classes", "channels"),
)
#: Sizes of parts that a layer or model may lack.
_OPTIONAL = ("qk_nope_dim", "qk_rope_dim", "shared_hidden_dim", "dense_layers")
#: What the annotation of a field of plain values allows, by its parts.
_TYPES: dict[str, type] = {
    "int": Integral,
    "float": Real,
    "bool": bool,
    "str": str,
    "None": NoneType,
}


def check_fields(config: Any) -> None:
    """Checks the fields of a config by their annotations, and by name what means the same in all.

    Raises:
        TypeError: a value of another type than annotated.
        ValueError: a size that is no positive integer, a number that is not finite, ...
    """
    op = type(config).__qualname__.removesuffix(".Config")
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name.endswith(_SIZES) and isinstance(value, Real):
            least = 0 if name in _OPTIONAL else 1
            if not isinstance(value, Integral) or int(value) < least:
                raise ValueError(
                    f"{op}: {name} must be an integer >= {least}, got {name}={value!r}"
                )
        annotation = field.type
        if not isinstance(annotation, str):
            annotation = inspect.formatannotation(annotation)
        kinds = annotation.split(" | ")
        allowed = tuple(_TYPES[kind] for kind in kinds if kind in _TYPES)
        wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        if len(allowed) == len(kinds) and wrong:
            raise TypeError(f"{op}: {name} must be {annotation}, got {name}={value!r}")
        if name.endswith("eps") and not 0 <= value < math.inf:
            raise ValueError(f"{op}: {name} must be finite and >= 0, got {name}={value}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{op}: {name} must be finite, got {name}={value}")
        if name.endswith("init_std") and value is not None:
            require_number(op, name, value, 0)
        if name.endswith(("dropout_p", "dropout")):
            require_number(op, name, value, 0, 1)
        if name == "window_size":
            require_pair(op, name, value, -1)
        for option, choices in (("casting", CASTINGS), ("backend", BACKENDS)):
            if name == option and value not in choices:
                raise ValueError(f"{op}: {name} must be one of {choices}, got {name}={value!r}")


@dataclass(frozen=True)
class LayerConfig:
    """What a layer is built from."""

    #: The layer that has this class as its `Config`.
    layer: ClassVar[type[Layer]]

    def __post_init__(self) -> None:
        check_fields(self)

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The layer."""
        return self.layer(self, device=device, dtype=dtype)


class Float32Buffers(nn.Module):
    """A module whose buffers stay in fp32 where its parameters become half ones: what moves in
    small steps would stand still."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, buffer.to(moved.device))
        return self


class Layer(nn.Module):
    """A module that is built from a value of its nested class `Config`, or from its fields.

    A layer joins `layers` by being defined, under the name of its class or `name=` of the class
    statement. Subclasses such as :class:`omniattn.modules.Mixer` are roles: what a place of a block
    takes.
    """

    Config: ClassVar[Any]
    #: All layers by name.
    layers: ClassVar[dict[str, type[Layer]]] = {}

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in vars(cls):
            return
        name = cls.__name__ if name is None else name
        known = Layer.layers.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"Layer: names must be unique, got name={name!r} of {known.__module__}."
                f"{known.__qualname__} and {cls.__module__}.{cls.__qualname__}"
            )
        Layer.layers[name] = cls  # anew where a cell of a notebook runs again
        cls.Config.layer = cls

    @classmethod
    def require_config(cls, op: str, name: str, config: Any) -> None:
        """`config` must be of a layer that is a `cls`."""
        if not isinstance(config, LayerConfig) or not issubclass(config.layer, cls):
            fit = (known for known, layer in Layer.layers.items() if issubclass(layer, cls))
            raise TypeError(
                f"{op}: {name} must be the Config of {', '.join(fit)}, got {name}={config!r}"
            )


def config_or_fields(
    kind: type[LayerConfig],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets `__init__(self, config, *, device, ...)` take the fields of the config in its place.

    `RMSNorm(512, eps=1e-5, device="cuda")` is `RMSNorm(RMSNorm.Config(512, eps=1e-5),
    device="cuda")`: what else `__init__` takes is then given by name. The signature shows the
    fields; type checkers take any arguments.
    """
    layer = kind.__qualname__.removesuffix(".Config")

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        self_, _, *others = inspect.signature(init).parameters.values()
        keywords = [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        names = {keyword.name for keyword in keywords}

        @functools.wraps(init)
        def init_from_either(self: Layer, *args: Any, **kwargs: Any) -> None:
            if "config" in kwargs and not isinstance(kwargs["config"], kind):
                got = f"config={kwargs['config']!r}"
                raise TypeError(f"{layer}: config must be a {layer}.Config, got {got}")
            if "config" in kwargs or (args and isinstance(args[0], kind)):
                init(self, *args, **kwargs)
                return
            own = {name: kwargs.pop(name) for name in names.intersection(kwargs)}
            try:
                config = kind(*args, **kwargs)
            except TypeError as error:
                if str(error).startswith(f"{layer}: "):
                    raise
                given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
                raise TypeError(
                    f"{layer}: must have a {layer}.Config or its fields, "
                    f"got {given or 'nothing'} ({error})"
                ) from error
            init(self, config, **own)

        fields = inspect.signature(kind).parameters.values()
        signature = inspect.Signature([self_, *fields, *keywords])
        init_from_either.__signature__ = signature  # type: ignore[attr-defined]
        return init_from_either

    return decorate
