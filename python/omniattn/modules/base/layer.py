"""Base classes of layers built from a `Config`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import holds_arrays, shown
from omniattn.former_names import accept_former_names, present_names
from omniattn.functional._keywords import explain_init
from omniattn.modules.base.fields import Fields, check_number
from omniattn.suggestions import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., None])

#: Part of a plain field's annotation -> type of valid values.
_TYPES: dict[str, type] = {
    "int": Integral,
    "float": Real,
    "bool": bool,
    "str": str,
    "None": NoneType,
}


def check_fields(config: Any) -> None:
    """Checks the fields of a config by their annotations.

    Raises:
        TypeError: a value does not have the annotated type.
        ValueError: a size is not a positive integer, a number is not finite, ...
    """
    op = type(config).__qualname__.removesuffix(".Config")
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        kind = config._kinds.get(name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        of_numbers = kind is not None and kind.of_numbers
        if kind is not None and of_numbers and is_number:
            kind.check(op, name, value)
        _check_type(op, name, value, field.type)
        if is_number and not of_numbers:
            check_number(op, name, value)
        if kind is not None and not of_numbers:
            kind.check(op, name, value)


def _check_type(op: str, name: str, value: Any, annotation: Any) -> None:
    if not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    kinds = annotation.split(" | ")
    allowed = tuple(_TYPES[kind] for kind in kinds if kind in _TYPES)
    wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
    parts = [kind.rpartition(".")[2] for kind in kinds if kind.endswith("Config")]
    if len(allowed) + len(parts) == len(kinds):
        is_part = isinstance(value, LayerConfig) or _has_base(value, parts)
        wrong = wrong and not (parts and is_part)
    else:
        wrong = holds_arrays(value) and "Tensor" not in annotation
    if wrong:
        raise TypeError(f"{op}: {name} must be {annotation}, got {name}={shown(value)}")


def _has_base(value: Any, names: list[str]) -> bool:
    return any(base.__name__ in names for base in type(value).__mro__)


@dataclass(frozen=True)
class LayerConfig(Fields):
    """Base class of layer configs."""

    @property
    def layer(self) -> type[Layer]:
        """The layer with this class as its `Config`; defining the layer sets this attribute."""
        raise NotImplementedError(f"{type(self).__qualname__}: no layer has this Config")

    def __post_init__(self) -> None:
        check_fields(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(present_names(type(self).__qualname__, state))

    def _require_multiple(self, name: str, of: str) -> None:
        """Raises ValueError unless the size `name` is a multiple of the size `of`."""
        size, unit = getattr(self, name), getattr(self, of)
        if size % unit:
            op = type(self).__qualname__.removesuffix(".Config")
            raise ValueError(
                f"{op}: {name} must be a multiple of {of}, got {name}={size}, {of}={unit}"
            )

    def with_backend(self, backend: str | None) -> Self:
        """Returns a copy with `backend` set here and in nested configs, or self if it is None."""
        if backend is None:
            return self
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LayerConfig):
                changed[field.name] = value.with_backend(backend)
            elif field.name == "backend":
                changed[field.name] = backend
        return replace(self, **changed)

    def as_arguments(self) -> str:
        """Formats the fields that differ from their defaults, without nested configs.

        `causal` is always included, since layers and functions have different defaults for it.
        """
        return ", ".join(
            f"{field.name}={shown(value)}"
            for field in fields(self)
            if not isinstance(value := getattr(self, field.name), LayerConfig)
            and (field.name == "causal" or value != field.default)
        )

    def build(self, **factory: Any) -> Any:
        """Builds the layer; `factory` are its device and dtype."""
        return self.layer(self, **factory)


class Float32Buffers(nn.Module):
    """A module whose buffers stay in fp32 when its parameters are converted to half.

    Small updates of such buffers would be lost in rounding.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, buffer.to(moved.device))
        return self


class Layer(nn.Module):
    """A module built from its nested `Config` class, or from the config's fields.

    Defining a layer registers it in `layers`, by its class name or by `name=` in the class
    statement. Subclasses such as :class:`omniattn.modules.Mixer` are the roles of layers in a
    block.
    """

    Config: ClassVar[Any]
    #: Name -> layer.
    layers: ClassVar[dict[str, type[Layer]]] = {}

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" not in vars(cls):
            return
        name = cls.__name__ if name is None else name
        known = Layer.layers.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"Layer: names must be unique, got name={shown(name)} of {known.__module__}."
                f"{known.__qualname__} and {cls.__module__}.{cls.__qualname__}"
            )
        accept_former_names(cls.Config)
        explain_init(cls.Config)
        Layer.layers[name] = cls  # rerunning a notebook cell redefines the layer
        cls.Config.layer = cls

    #: True if an enclosing layer initialises the parameters; `reset_parameters` then skips them.
    drawn_outside = False

    def draws(self, *parts: str) -> None:
        """Declares that this layer's `reset_parameters` initialises the parameters of these parts.

        FSDP, for example, resets every module, and submodules after the layer that contains them.
        """
        for part in parts:
            cast(Layer, self.get_submodule(part)).drawn_outside = True

    def extra_repr(self) -> str:
        """Returns the config, for print(module)."""
        config = vars(self).get("config")
        return config.as_arguments() if isinstance(config, LayerConfig) else ""

    @classmethod
    def require_config(cls, op: str, name: str, config: Any) -> None:
        """Requires that `config` is the config of a subclass of `cls`."""
        if not isinstance(config, LayerConfig) or not issubclass(config.layer, cls):
            fit = sorted(known for known, layer in Layer.layers.items() if issubclass(layer, cls))
            raise TypeError(
                f"{op}: {name} must be the Config of {', '.join(fit)}, got {name}={shown(config)}"
            )


@overload
def config_or_fields(
    kind: type[LayerConfig], *, make: Callable[..., LayerConfig] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]: ...
@overload
def config_or_fields(
    kind: type[LayerConfig], like: F, *, make: Callable[..., LayerConfig] | None = None
) -> Callable[[Callable[..., None]], F]: ...
def config_or_fields(
    kind: type[LayerConfig],
    like: Callable[..., None] | None = None,
    *,
    make: Callable[..., LayerConfig] | None = None,
) -> Callable[[Callable[..., None]], Any]:
    """Lets `__init__(self, config, *, device, ...)` also accept the config's fields as arguments.

    `RMSNorm(512, eps=1e-5, device="cuda")` is `RMSNorm(RMSNorm.Config(512, eps=1e-5),
    device="cuda")`; the arguments of `__init__` after the config are then keyword-only. The
    signature at run time shows the fields. Type checkers see the signature of `like`, which
    forms.py derives from the config; without it they accept any arguments. `make` builds the config
    from the fields; default: the config class.
    """
    new = kind if make is None else make
    layer = kind.__qualname__.removesuffix(".Config")

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(init).parameters.values())
        place = [parameter.name for parameter in parameters].index("config")
        before, after = parameters[1:place], parameters[place + 1 :]
        keywords = [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in after]
        names = {other.name for other in before + after}
        fields = list(inspect.signature(new).parameters.values())
        taken = [*(field.name for field in fields), *inspect.signature(kind).parameters, *names]
        known = ", ".join(field.name for field in fields)

        @functools.wraps(init)
        def init_from_either(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if "config" in kwargs and not isinstance(kwargs["config"], kind):
                got = f"config={kwargs['config']!r}"
                raise TypeError(f"{layer}: config must be a {layer}.Config, got {got}")
            leading, args = args[: len(before)], args[len(before) :]
            if "config" in kwargs or (args and isinstance(args[0], kind)):
                if both := [name for name in kwargs if name in taken and name not in names]:
                    raise TypeError(
                        f"{layer}: must have a {layer}.Config or its fields, got both a config and "
                        f"{', '.join(both)}; dataclasses.replace(config, ...) changes fields"
                    )
                init(self, *leading, *args, **kwargs)
                return
            own = {name: kwargs.pop(name) for name in names.intersection(kwargs)}
            try:
                config = new(*args, **kwargs)
            except TypeError as error:
                if str(error).startswith(f"{layer}: "):
                    raise
                given = ", ".join(
                    [*map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())]
                )
                raise TypeError(
                    f"{layer}: must have a {layer}.Config or its fields, "
                    f"got {given or 'nothing'} ({_explained(error, kwargs, taken)}); "
                    f"the fields are {known}"
                ) from error
            init(self, *leading, config=config, **own)

        order = [parameters[0], *before, *fields, *keywords]
        signature = inspect.Signature(sorted(order, key=lambda parameter: parameter.kind))
        init_from_either.__signature__ = signature  # type: ignore[attr-defined]
        init_from_either.fields_of = new  # type: ignore[attr-defined]
        return init_from_either

    return decorate


def _explained(error: TypeError, given: Collection[str], known: Collection[str]) -> str:
    """Returns the config's error text with a suggestion for the first unknown argument."""
    unknown = next((name for name in given if name not in known), None)
    return f"{str(error).partition('; did you mean')[0]}{did_you_mean(unknown, known)}"
