"""States of token mixers after past tokens: the protocol, and recurrent states."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    FLOATS,
    require_float,
    require_int,
    require_integers,
    require_rows,
    require_strided,
    same_values,
    shown,
)
from omniattn.checks.ranks import ACTIVE
from omniattn.suggestions import did_you_mean

Forward = TypeVar("Forward", bound=Callable[..., Any])


@runtime_checkable
class State(Protocol):
    """Interface of a layer's state for decoding, independent of the mixer. Inference only.

    `forward(x, state=state)` reads it and updates it to the state after the last token of x.
    `copy.deepcopy` copies it.
    """

    @property
    def length(self) -> int:
        """Number of tokens in the longest sequence."""

    @property
    def nbytes(self) -> int:
        """Size of the allocated storage in bytes, used or not."""

    def crop(self, length: int) -> None:
        """Removes all tokens from position `length` on; ValueError if that is impossible."""

    def reorder(self, index: Tensor) -> None:
        """Replaces row b by row index[b]; index (B',) int can repeat, drop or swap sequences."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the stored contents, without unused storage."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the `state_dict` of a state of the same kind and sizes."""


class Storage(TypedDict, total=False):
    """Options of `new_state`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Stateful:
    """A mixer with a state, or a model, whose state is the list of its layers' states."""

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> Any:
        """Creates the state of `batch` sequences before their first token.

        Args:
            batch: number of sequences.
            max_length: largest number of tokens; ignored by states of constant size.
            device, dtype: device and dtype of the storage; default: those of the parameters.
        """
        raise NotImplementedError(f"{type(self).__name__}: new_state is not defined")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "new_state" in vars(cls):
            cls.new_state = _checked(cls.new_state)  # type: ignore[method-assign]

    def new_cache(
        self, batch: int, max_length: int, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        """Calls `new_state`, of which this is the former name."""
        return self.new_state(batch, max_length, dtype=dtype, **options)


class RecurrentState:
    """Tensors (B, ...) that a recurrence carries from token to token; constant size.

    A recurrence cannot remove tokens. To replace the last tokens, continue from a `copy.deepcopy`
    made before them.

    Args:
        tensors: initial tensors by name; a convolution stores its last inputs in one of them.

    Raises:
        ValueError: a shape does not match, or tokens are cropped.
        RuntimeError: a stored tensor requires a gradient.

    Example:
        >>> state = RecurrentState(h=torch.zeros(2, 8))
        >>> state.advance(3, h=state["h"] + 1)
        >>> state, state.nbytes
        (RecurrentState(length=3, h=(2, 8)), 64)
    """

    #: Kind of the layer that created the state; other kinds cannot interpret its tensors.
    kind: str | None = None
    #: Names of the tensors of integers.
    integers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors
        self._derived: dict[str, tuple[Tensor, Tensor]] = {}
        self.length = 0
        #: True if the state includes tokens of a call that failed in a later layer.
        self.is_ahead = False

    def __repr__(self) -> str:
        shapes = "".join(f", {name}={tuple(t.shape)}" for name, t in self._tensors.items())
        return f"RecurrentState(length={self.length}{shapes})"

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(
                f"RecurrentState: state must have {name!r} for this layer, the state of another "
                f"one was given, got {', '.join(self._tensors)}"
            )
        return self._tensors[name]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of one sequence, by name."""
        return {name: tuple(t.shape[1:]) for name, t in self._tensors.items()}

    def require_like(
        self, op: str, shapes: dict[str, tuple[int, ...]], x: Tensor, kind: str | None = None
    ) -> None:
        """Requires a state of this `kind` of layer with these `shapes` per sequence, for the
        sequences of x (B, T, dim)."""
        if self._tensors.keys() != shapes.keys():
            raise ValueError(
                f"{op}: state must have {', '.join(shapes)}, the state of another layer was given, "
                f"got {', '.join(self._tensors)}"
            )
        if kind is not None and self.kind not in (None, kind):
            raise ValueError(f"{op}: state must be that of a {kind}, got that of a {self.kind}")
        for name, t in self._tensors.items():
            if tuple(t.shape[1:]) != shapes[name]:
                raise ValueError(
                    f"{op}: state must be that of this layer, state[{name!r}] of shape "
                    f"{(x.shape[0], *shapes[name])}, got state[{name!r}].shape={tuple(t.shape)}"
                )
            if t.shape[0] != x.shape[0]:
                raise ValueError(
                    f"{op}: state must be of the B={x.shape[0]} sequences of x, got "
                    f"state[{name!r}].shape={tuple(t.shape)}"
                )
            floating = name not in self.integers
            if t.device != x.device or t.is_floating_point() != floating:
                raise ValueError(
                    f"{op}: state must be {'floating-point' if floating else 'integers'} and on "
                    "the device of x, got "
                    f"state[{name!r}].dtype={t.dtype}, state[{name!r}].device={t.device}, "
                    f"x.device={x.device}"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Omits tensors derived from parameters, since another process derives its own."""
        return {**self.__dict__, "_derived": {}}

    def derived(self, name: str, parameter: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns `make(parameter)`, cached until the parameter's values change.

        The values are compared with a copy, since the tensor's version counter misses writes by
        numpy and through `parameter.data`. Comparing the weight of a convolution takes a sixth of
        the time that a step would lose by reading it in another layout.
        """
        known = self._derived.get(name)
        if known is None or not same_values(known[0], parameter):
            self._derived[name] = known = (parameter.detach().clone(), make(parameter))
        return known[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    def advance(self, count: int, **tensors: Tensor) -> None:
        """Stores all tensors after `count` more tokens, in the state's dtypes."""
        self._store(self.length + count, tensors)

    def _store(self, length: int, tensors: dict[str, Tensor]) -> None:
        take("RecurrentState", tensors, *self._tensors)
        for name, new in tensors.items():
            fits = self._tensors[name].shape
            if new.requires_grad:
                raise RuntimeError(
                    "RecurrentState: supports inference only, wrap the call in torch.no_grad()"
                )
            if new.shape != fits:
                raise ValueError(
                    f"RecurrentState: {name} must have shape {tuple(fits)}, "
                    f"got {name}={tuple(new.shape)}"
                )
        for name, new in tensors.items():
            if new is not self._tensors[name]:  # a kernel may have updated it in place
                self._tensors[name].copy_(new)
        self.length = length

    def crop(self, length: int) -> None:
        require_int("RecurrentState", "length", length)
        if length != self.length:
            raise ValueError(
                "RecurrentState: a recurrence cannot forget tokens, continue from a copy.deepcopy "
                f"made before them; length must be {self.length}, got length={length}"
            )

    def reorder(self, index: Tensor) -> None:
        require_index("RecurrentState", index, next(iter(self._tensors.values())).shape[0])
        self._tensors = {name: t.index_select(0, index) for name, t in self._tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: t.clone() for name, t in self._tensors.items()} | {"length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        op = "RecurrentState"
        *saved, length = take(op, state, *self._tensors, "length")
        require_int(op, "length", length, 0)
        tensors = dict(zip(self._tensors, saved, strict=True))
        for name, t in tensors.items():
            (require_integers if name in self.integers else require_float)(op, name, t)
            require_strided(op, name, t)
        self._store(length, tensors)
        self.is_ahead = False


class States:
    """States, by name, of layers that read the same tokens; the first one counts them."""

    def __init__(self, **states: State) -> None:
        self._states = states

    def get(self, name: str) -> State | None:
        """Returns the state of this name, None if there is none."""
        return self._states.get(name)

    @property
    def parts(self) -> tuple[State, ...]:
        """The states in the order of their names."""
        return tuple(self._states.values())

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def crop(self, length: int) -> None:
        # From the last one on: caches come before recurrences, which cannot forget tokens.
        for part in reversed(self.parts):
            part.crop(length)

    def reorder(self, index: Tensor) -> None:
        for part in self.parts:
            part.reorder(index)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._states.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = take(type(self).__name__, state, *self._states)
        for part, each in zip(self.parts, saved, strict=True):
            part.load_state_dict(each)


class StatePair(States):
    """States of a mixer and of the channel mixer after it, for the same tokens."""

    def __init__(self, mixer: State, mlp: State) -> None:
        super().__init__(mixer=mixer, mlp=mlp)

    @property
    def mixer(self) -> State:
        """State of the mixer."""
        return self._states["mixer"]

    @property
    def mlp(self) -> State:
        """State of the channel mixer."""
        return self._states["mlp"]


def take(op: str, state: dict[str, Any], *keys: str) -> list[Any]:
    """Returns the values of `keys`; a saved state must have exactly these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: state must be what state_dict returns, got state={shown(state)}")
    if set(state) != set(keys):
        missing = [key for key in keys if key not in state]
        unexpected = [key for key in state if key not in keys]
        raise ValueError(
            f"{op}: state must have the keys {', '.join(keys)}, "
            f"got missing={missing}, unexpected={unexpected}"
        )
    return [state[key] for key in keys]


def require_index(op: str, index: Tensor, batch: int) -> None:
    """Requires that `index` (B',) holds rows of a state of `batch` sequences."""
    require_integers(op, "index", index)
    if index.dim() != 1:
        raise ValueError(f"{op}: index must have shape (B',), got index.shape={tuple(index.shape)}")
    require_rows(op, "index", index, batch)


def _checked(new_state: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `new_state`: checks its arguments and sets the kind of a recurrent state."""
    _, *others = inspect.signature(new_state).parameters.values()
    by_place = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = [p.name for p in others if p.kind is p.KEYWORD_ONLY]
    more = [p for p in others if p.kind is p.VAR_KEYWORD]
    open_ended = any("Storage" not in str(p.annotation) for p in more)
    options += Storage.__annotations__ if more else ()

    @wraps(new_state)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        op, given = type(self).__name__, dict(zip(by_place, args, strict=False)) | kwargs
        for name, value in given.items():
            if name in ("batch", "max_length"):
                require_int(op, name, value, 0)
            elif name == "dtype" and value is not None and value not in FLOATS:
                raise TypeError(
                    f"{op}: dtype must be float64, float32, bfloat16 or float16, "
                    f"got dtype={shown(value)}"
                )
            elif not open_ended and name not in by_place and name not in options:
                raise TypeError(
                    f"{op}: options of new_state must be among {', '.join(options)}, "
                    f"got {name}={shown(value)}{did_you_mean(name, options)}"
                )
        state = new_state(self, *args, **kwargs)
        # A block returns its mixer's state, whose kind is set already.
        if isinstance(state, RecurrentState) and state.kind is None:
            state.kind = kind_of(self)
        return state

    return checked


def kind_of(layer: Any) -> str:
    """Returns the class name of a layer, derived from its config.

    torch replaces the class of a module with parametrisations or shards.
    """
    return type(getattr(layer, "config", layer)).__qualname__.removesuffix(".Config")


def parts_of(state: Any) -> Sequence[State]:
    """Returns the elementary states within `state`, without caches of cross-attention."""
    if isinstance(state, tuple) and state:
        return parts_of(state[0])
    if isinstance(state, list):
        return [part for each in state for part in parts_of(each)]
    if not hasattr(state, "parts"):
        return [state]
    return [part for each in state.parts for part in parts_of(each)]


@contextlib.contextmanager
def _restored_on_error(state: Any) -> Iterator[None]:
    """Removes the tokens of a failing call from the state of a layer, or the states of a model.

    A state that cannot remove them (a recurrence, a cache that has overwritten older tokens) is
    marked as ahead, and the next call of a model refuses it.
    """
    parts = [part for part in parts_of(state) if hasattr(part, "length")]
    before = [part.length for part in parts]
    try:
        yield
    except BaseException:
        for part, length in zip(parts, before, strict=True):
            if part.length > length:
                try:
                    part.crop(length)
                except ValueError:
                    setattr(part, "is_ahead", True)  # noqa: B010, State has no such attribute
        raise


def takes_cache(forward: Forward) -> Forward:
    """Wraps a forward so that it also accepts the former names `cache` and `memory_cache`.

    The present names are `state` and `memory_state`. A `rope` must be a pair of tensors. Tokens of
    a failing call are removed from the state, see `_restored_on_error`.
    """

    def by_either_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("rope") is not None:
            _require_tables(type(self).__name__, kwargs["rope"])
        for former, name in (("cache", "state"), ("memory_cache", "memory_state")):
            if former in kwargs:
                given = kwargs.pop(former)
                if kwargs.setdefault(name, given) is not given:
                    raise TypeError(
                        f"{type(self).__name__}: {name} must not be given as {former} too"
                    )
        state = kwargs.get("state")
        if state is None:
            return forward(self, *args, **kwargs)
        if ACTIVE.region is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: state must be None within context_parallel, "
                "where a rank has some of the tokens"
            )
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        with _restored_on_error(state):
            return forward(self, *args, **kwargs)

    # torch.compile limits recompilations per code object, so layers must not share one.
    code = by_either_name.__code__
    by_either_name.__code__ = code.replace(co_name=forward.__qualname__)
    return wraps(forward)(by_either_name)  # type: ignore[return-value]


def _require_tables(op: str, rope: Any) -> None:
    pair = isinstance(rope, (tuple, list)) and len(rope) == 2
    if not pair or not all(isinstance(t, Tensor) for t in rope):
        raise TypeError(f"{op}: rope must be the tensors (cos, sin), got rope={shown(rope)}")
