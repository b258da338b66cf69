"""Base classes of all architectures: Model, and ModelConfig, which checkpoints store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from omniattn.checks.arguments import require_device, require_integers, require_rows, shown
from omniattn.models.hf import SYNONYMS, TOKEN_IDS, Counterpart, complement, copy_weights
from omniattn.modules.base.fields import Backend, Fields
from omniattn.modules.base.layer import Layer, LayerConfig, check_fields
from omniattn.reference import RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from typing_extensions import Self


def require_token_ids(op: str, name: str, tokens: torch.Tensor) -> None:
    """Raises unless `tokens` are integers (B, T)."""
    require_integers(op, name, tokens)
    if tokens.dim() != 2:
        raise ValueError(
            f"{op}: {name} must have shape (B, T), got {name}.shape={tuple(tokens.shape)}"
        )


class Embedding(nn.Embedding):
    """torch.nn.Embedding initialised from N(0, init_std^2), times `scale`.

    `name` is the indices' name in errors; they are checked on the CPU, torch asserts them on CUDA.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        init_std: float,
        *,
        name: str = "tokens",
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.scale = scale
        self.init_std = init_std  # before the constructor, which uses it
        super().__init__(rows, dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialises the weight."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Maps index (...), of any integer dtype, to (..., dim)."""
        require_integers("Embedding", self.name, index)
        require_device("Embedding", self.name, index, self.weight, "weight")
        require_rows("Embedding", self.name, index, self.num_embeddings)
        rows = super().forward(index.long())  # torch supports only int32 and int64
        if self.scale == 1.0:
            return rows
        # As in transformers, the factor is rounded to the dtype of the weights.
        return rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)


class Model(nn.Module):
    """Base class: `model(*inputs)` returns logits, `model(*inputs, targets)` the mean loss."""

    config: ModelConfig

    def auxiliary_loss(self) -> torch.Tensor | float:
        """Returns the last forward's further loss terms in training, without router losses."""
        return 0.0

    def before_step(self, done: float) -> None:
        """Changes gradients before an optimizer step; `done` is the finished share of training."""

    def after_step(self, done: float) -> None:
        """Changes the state after an optimizer step; `done` is the finished share of training."""

    def further_losses(self) -> dict[str, float]:
        """Returns the unweighted parts of the auxiliary loss by name, for display."""
        return {}

    @classmethod
    def from_hf(cls, model: PreTrainedModel, *, backend: str | None = None) -> Self:
        """Converts a transformers model to a copy on the same device and in the same dtype.

        Raises:
            NotImplementedError: the model is not one that `to_hf` of this class returns, or has
                unsupported options or weights.

        Example:
            >>> from transformers import BertConfig, BertForMaskedLM
            >>> sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
            >>> Model.from_hf(BertForMaskedLM(BertConfig(**sizes))).config.dim
            48
        """
        name = type(model).__name__
        weight = next(model.parameters())
        config = replace(config_of_hf(name).from_hf(model.config), backend=backend)
        ours = config.build(device=weight.device, dtype=weight.dtype)
        if not isinstance(ours, cls):
            raise NotImplementedError(f"from_hf: model must become a {cls.__name__}, got {name}")
        for our_weights, their_weights in config.counterpart.pairs(ours, model):
            copy_weights(their_weights, our_weights)
        complement(ours.state_dict(), (name for name, _ in config.counterpart.complements(ours)))
        return ours.train(model.training)

    def to_hf(self) -> PreTrainedModel:
        """Converts to a transformers model, a copy on the same device and in the same dtype.

        Raises:
            NotImplementedError: transformers lacks the architecture or an option.
        """
        weight = next(self.parameters())
        model = self.config.build_hf()
        nn.Module.to(model, weight.device, weight.dtype)
        counterpart = self.config.counterpart
        for our_weights, their_weights in counterpart.pairs(self, model):
            copy_weights(our_weights, their_weights)
        complement(model.state_dict(), (name for _, name in counterpart.complements(self)))
        model.train(self.training)
        return model


@dataclass(frozen=True)
class ModelConfig(Fields, ABC):
    """Sizes and options of an architecture.

    Args:
        backend: backend of all ops, e.g. "reference".
        token_ids: ids of special tokens by their names in transformers, such as
            ``(("eos_token_id", 2),)``. `from_hf` sets them and `to_hf` passes them on; they have no
            other effect, and equality of configs ignores them.
    """

    #: Name of the architecture in files; registers the config in `architectures`.
    architecture: ClassVar[str]
    architectures: ClassVar[dict[str, type[ModelConfig]]] = {}
    #: Counterpart in transformers; None if it has none.
    hf: ClassVar[Counterpart | None] = None

    backend: Backend = field(default=None, kw_only=True)
    token_ids: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True, compare=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "architecture" in vars(cls):
            ModelConfig.architectures[cls.architecture] = cls

    def __post_init__(self) -> None:
        check_fields(self)
        for pair in self.token_ids:
            if not isinstance(pair, tuple) or len(pair) != 2 or pair[0] not in TOKEN_IDS:
                raise ValueError(
                    f"{type(self).__qualname__.removesuffix('.Config')}: token_ids must be pairs "
                    f"of {', '.join(TOKEN_IDS)} and their ids, "
                    f"got token_ids={shown(self.token_ids)}"
                )

    @abstractmethod
    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Model:
        """Builds the model, with weights drawn from torch's generator."""

    def build_body(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Model:
        """Builds the model without its head, for another one: `hidden` gives states (B, T, dim).

        Raises:
            NotImplementedError: the model gives no states of tokens.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: the model must be a decoder or a text encoder to get another "
            "head"
        )

    @property
    def longest(self) -> int | None:
        """Returns the longest sequence with positions, or None without a limit."""
        return None

    @property
    def logit_softcap(self) -> float:
        """Returns c of the logits c tanh(logit / c), or 0 without a cap."""
        return 0.0

    @property
    def l2_wrap(self) -> float:
        """Returns c of the penalty c/2 mean(max logit^2) on the loss's gradient, or 0."""
        return 0.0

    @property
    def num_parameters(self) -> int:
        """Returns the number of parameters."""
        return sum(p.numel() for p in self.build(device="meta").parameters())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, without the backend."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "backend"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverts `to_dict`, also after a round trip through JSON."""
        return cls(**{name: _value(value) for name, value in values.items()})

    @classmethod
    def is_of_hf(cls, name: str) -> bool:
        """Returns True if transformers' class of this name is a counterpart."""
        return cls.hf is not None and cls.hf.model == name

    @property
    def counterpart(self) -> Counterpart:
        """Returns `hf`; raises if transformers lacks the architecture."""
        if self.hf is None:
            raise NotImplementedError(f"{type(self).__name__}: transformers has no such model")
        return self.hf

    def build_hf(self) -> PreTrainedModel:
        """Builds the transformers model, with its own initial weights."""
        import transformers

        return getattr(transformers, self.counterpart.model)(self.to_hf())

    def to_hf(self) -> PreTrainedConfig:
        """Converts to a transformers config, without options used only by our training.

        `from_hf` drops their fields that do not affect the computation, except the ids of special
        tokens; `to_hf` gives those fields transformers' defaults.

        Raises:
            NotImplementedError: transformers lacks the architecture or an option.
        """
        own = self.counterpart.options.values()  # an id that affects the computation
        given = {name: i for name, i in self.token_ids if name not in own}
        ids = {name: list(i) if isinstance(i, tuple) else i for name, i in given.items()}
        return self.counterpart.config_class(**self.counterpart.to_hf(self) | ids)

    @classmethod
    def from_hf(cls, config: PreTrainedConfig) -> Self:
        """Converts a transformers config.

        Raises:
            NotImplementedError: the config is of another architecture or has an unsupported option.
            ValueError: the rotary scaling is unknown.
        """
        if cls.hf is None:
            raise NotImplementedError(f"{cls.__name__}: transformers has no such model")
        model_type = cls.hf.config_class.model_type
        if config.model_type != model_type:
            raise NotImplementedError(
                f"{cls.__name__}: model_type must be {model_type!r}, "
                f"got model_type={shown(config.model_type)}"
            )
        ids = [(name, getattr(config, name)) for name in TOKEN_IDS if hasattr(config, name)]
        found = cls.from_dict(cls.hf.from_hf(config) | {"token_ids": ids})
        for name, wanted in cls.hf.required(found).items():
            value = _value(getattr(config, name))
            if isinstance(value, str):
                value = SYNONYMS.get(value, value)
            if value != wanted:
                raise NotImplementedError(
                    f"{cls.__name__}: {name} must be {wanted!r}, got {name}={shown(value)}"
                )
        return found


def config_of_hf(name: str) -> type[ModelConfig]:
    """Returns the config class whose counterpart is transformers' class of this name."""
    kinds = ModelConfig.architectures.values()
    known = {kind.hf.model: kind for kind in kinds if kind.hf is not None}
    if name not in known:
        for kind in kinds:
            if kind.is_of_hf(name):
                return kind
        raise NotImplementedError(
            f"from_hf: model must be one of {', '.join(sorted(known))}, got {name}; "
            "omniattn.hf.patch replaces layers of others in place"
        )
    return known[name]


class UnknownLayer(ValueError):
    """Raised if a layer's class is not defined, or its module has not been imported."""

    def __init__(self, kind: object) -> None:
        super().__init__(
            "from_dict: type must be a scaling or a layer whose class is defined, "
            f"got type={shown(kind)}; import the module that defines it first"
        )
        self.kind = kind


def _plain(value: Any) -> Any:
    """Converts values for JSON: configs and scalings become dicts with the name of their type."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, LayerConfig):
        kind = next(name for name, layer in Layer.layers.items() if layer is value.layer)
    elif isinstance(value, ModelConfig):
        return value.to_dict() | {"type": value.architecture}
    elif isinstance(value, RopeScaling):
        kind = type(value).__name__
    else:
        return value
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)} | {"type": kind}


def _value(value: Any) -> Any:
    """Inverts `_plain`, also after a round trip through JSON."""
    if isinstance(value, dict):
        kinds = {kind.__name__: kind for kind in RopeScaling.__subclasses__()}
        kinds |= {name: layer.Config for name, layer in Layer.layers.items()}
        if value.get("type") in ModelConfig.architectures:
            rest = {name: v for name, v in value.items() if name != "type"}
            return ModelConfig.architectures[value["type"]].from_dict(rest)
        if value.get("type") not in kinds:
            raise UnknownLayer(value.get("type"))
        options = {name: _value(v) for name, v in value.items() if name != "type"}
        return kinds[value["type"]](**options)
    return tuple(map(_value, value)) if isinstance(value, list | tuple) else value
