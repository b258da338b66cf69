"""What all architectures have in common: a model, and its Config, which goes into files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from omniattn.models.tasks import Task
from omniattn.reference import RopeScaling

if TYPE_CHECKING:
    from typing_extensions import Self


class Model(nn.Module):
    """`model(*inputs)` gives logits, `model(*inputs, targets)` the mean loss."""

    config: ModelConfig


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Sizes and options of an architecture.

    Args:
        backend: of all ops, e.g. "reference".
    """

    #: Name of the architecture in files.
    architecture: ClassVar[str]
    #: What `omniattn train` trains it on.
    task: ClassVar[type[Task]]
    #: Where that training differs from the defaults of `TrainConfig`.
    recipe: ClassVar[dict[str, Any]] = {}

    backend: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Model:
        """The model, with weights drawn from torch's generator."""

    @property
    def longest(self) -> int | None:
        """Number of positions that the model has, None for any number."""
        return None

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.build(device="meta").parameters())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the backend."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "backend"}
        for name, value in values.items():
            if isinstance(value, RopeScaling):
                values[name] = asdict(value) | {"type": type(value).__name__}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of to_dict, also of what JSON makes of its result."""
        return cls(**{name: _value(value) for name, value in values.items()})


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        kinds = {kind.__name__: kind for kind in RopeScaling.__subclasses__()}
        options = {name: _value(v) for name, v in value.items() if name != "type"}
        return kinds[value["type"]](**options)
    return tuple(value) if isinstance(value, list) else value
