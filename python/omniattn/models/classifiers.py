"""Classification heads on any decoder or text encoder: one label a text, or one a token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.functional.masks import KeyPadding
from omniattn.models.classifier_forms import CLASSIFIERS, TEXTS, Form, kind_of, stem_of
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.encoders.bert import BertConfig
from omniattn.models.encoders.text_encoder import TextEncoderConfig
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.models.model import Model, ModelConfig
from omniattn.modules import Dropout, Linear
from omniattn.modules.base.fields import Probability, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from typing_extensions import Self

POOLS = ("first", "last", "mean")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """Options shared by the classifiers.

    Args:
        model: config of the decoder or text encoder, whose own head is left out.
        classes: number of labels.
        dropout_p: dropout before each linear layer of the head.
        init_std: standard deviation of the head's initial weights.
    """

    #: End of the names of transformers' classes.
    ending: ClassVar[str]
    #: Dropout of transformers' decoders where the config has none.
    usual_dropout: ClassVar[float]

    model: ModelConfig = field(default_factory=BertConfig)
    classes: Size = 2
    dropout_p: Probability = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, Decoder.Config | TextEncoderConfig):
            raise ValueError(
                f"{type(self).__name__}: model must be the config of a decoder or a text encoder, "
                f"got model={shown(self.model)}"
            )

    @property
    def body(self) -> Decoder.Config | TextEncoderConfig:
        """Config of the model, with the classifier's backend."""
        assert isinstance(self.model, Decoder.Config | TextEncoderConfig)
        return replace(self.model, backend=self.backend or self.model.backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.body.vocab_size

    @property
    def longest(self) -> int | None:
        return self.model.longest

    @classmethod
    @abstractmethod
    def form(cls, kind: type[ModelConfig], model_type: str) -> Form | None:
        """Returns the head of transformers' class for a kind of model, or None without one."""

    @abstractmethod
    def require_form(self, form: Form) -> None:
        """Raises if transformers' head does not compute what this one does."""

    @classmethod
    def options_of(cls, form: Form) -> dict[str, Any]:
        """Returns the options for transformers' head."""
        return {}

    @classmethod
    def is_of_hf(cls, name: str) -> bool:
        return kind_of(lambda _, stem: stem + cls.ending == name) is not None

    @property
    def counterpart(self) -> Counterpart:
        kind, base = type(self.model), self.model.counterpart
        stem, form = stem_of(kind), self.form(kind, base.config_class.model_type)
        if stem is None or form is None:
            raise NotImplementedError(
                f"{type(self).__name__}: transformers has no such model of {kind.__name__}"
            )
        names: Renames = tuple(
            (rf"^(\w+\.)?{ours}\.", f"{theirs}.")
            for ours, theirs in (("classifier", form.classifier), ("transform", form.transform))
            if theirs is not None
        )

        def to_hf(ours: HeadConfig) -> dict[str, Any]:
            ours.require_form(form)
            body = ours.model
            usual = body.dropout_p if isinstance(body, TextEncoderConfig) else ours.usual_dropout
            dropout = None if ours.dropout_p == usual else ours.dropout_p
            own = {"num_labels": ours.classes, "classifier_dropout": dropout}
            return ours.model.counterpart.to_hf(ours.model) | own

        return replace(
            base,
            model=stem + self.ending,
            options={},
            fixed={},
            weights=(*base.weights, *names),
            layer_weights=lambda ours: ((r"^body\.", ""), *base.layer_weights(ours.model)),
            interleaved={key: _of_model(count) for key, count in base.interleaved.items()},
            conversions=(Conversion(to_hf, lambda theirs: {}),),
        )

    @classmethod
    def from_hf(cls, config: PreTrainedConfig) -> Self:
        kind = kind_of(lambda hf, _: hf.config_class.model_type == config.model_type)
        form = None if kind is None else cls.form(kind, config.model_type)
        if kind is None or form is None:
            raise NotImplementedError(
                f"{cls.__name__}: model_type must be that of a model with such a head, "
                f"got model_type={shown(config.model_type)}"
            )
        loss = getattr(config, "problem_type", None)
        if loss not in (None, "single_label_classification"):
            raise NotImplementedError(
                f"{cls.__name__}: problem_type must be 'single_label_classification', "
                f"got problem_type={shown(loss)}"
            )
        model = kind.from_hf(config)
        classes: Any = config.num_labels
        dropout: Any = getattr(config, "classifier_dropout", None)
        if dropout is None:
            dropout = getattr(config, "hidden_dropout_prob", cls.usual_dropout)
        return cls(
            model=model,
            classes=classes,
            dropout_p=dropout,
            token_ids=model.token_ids,
            **cls.options_of(form),
        )


def _of_model(count: Callable[[Any], int]) -> Callable[[Any], int]:
    """Returns a function of a classifier's config that reads that of its model."""
    return lambda ours: count(ours.model)


@dataclass(frozen=True)
class SequenceClassifierConfig(HeadConfig):
    """Config of :class:`SequenceClassifier`.

    Args:
        model: config of the decoder or text encoder, whose own head is left out.
        classes: number of labels.
        dropout_p: dropout before each linear layer of the head.
        init_std: standard deviation of the head's initial weights.
        pool: state of a text: that of its "first" token ([CLS]), of its "last" one that is no
            padding (decoders), or their "mean" without padding. The first token of a Longformer is
            then global, unless the call gives `global_index`.
        activation: "tanh", "gelu" or "gelu_tanh" to put a linear layer (dim, dim) and this
            activation before the last layer, None for none.
        bias: True for a bias of the last layer.
    """

    architecture = "sequence-classifier"
    ending = "ForSequenceClassification"
    usual_dropout = 0.0

    pool: str = "first"
    activation: str | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool not in POOLS:
            raise ValueError(
                f"SequenceClassifierConfig: pool must be one of {', '.join(POOLS)}, "
                f"got pool={shown(self.pool)}"
            )
        if self.activation is not None and self.activation not in _ACTIVATIONS:
            raise ValueError(
                "SequenceClassifierConfig: activation must be one of "
                f"{', '.join(_ACTIVATIONS)} or None, got activation={shown(self.activation)}"
            )

    @classmethod
    def form(cls, kind: type[ModelConfig], model_type: str) -> Form | None:
        if issubclass(kind, TextEncoderConfig):
            return TEXTS.get(model_type)
        return Form("score", bias=False)

    @classmethod
    def options_of(cls, form: Form) -> dict[str, Any]:
        pool = "first" if form.bias else "last"
        return {"pool": pool, "activation": form.activation, "bias": form.bias}

    def require_form(self, form: Form) -> None:
        for name, wanted in self.options_of(form).items():
            if (value := getattr(self, name)) != wanted:
                raise NotImplementedError(
                    f"SequenceClassifierConfig: {name} must be {wanted!r} in transformers for "
                    f"{type(self.model).__name__}, got {name}={value!r}"
                )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SequenceClassifier:
        return SequenceClassifier(self, device=device, dtype=dtype)


@dataclass(frozen=True)
class TokenClassifierConfig(HeadConfig):
    """Config of :class:`TokenClassifier`.

    Args:
        model: config of the decoder or text encoder, whose own head is left out.
        classes: number of labels.
        dropout_p: dropout before the head.
        init_std: standard deviation of the head's initial weights.
    """

    architecture = "token-classifier"
    ending = "ForTokenClassification"
    usual_dropout = 0.1

    @classmethod
    def form(cls, kind: type[ModelConfig], model_type: str) -> Form | None:
        own = issubclass(kind, TextEncoderConfig) or model_type in CLASSIFIERS
        return Form("classifier" if own else "score")

    def require_form(self, form: Form) -> None:
        """Accepts all: there are no options of the computation."""

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TokenClassifier:
        return TokenClassifier(self, device=device, dtype=dtype)


class _Classifier(Model):
    """A decoder or encoder without its head, and the last layer of another head."""

    def __init__(
        self,
        config: HeadConfig,
        bias: bool,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        dim = c.body.dim
        self.body: Any = c.body.build_body(device=device, dtype=dtype)
        self.dropout = Dropout(c.dropout_p)
        last = Linear.Config(dim, c.classes, bias, c.init_std, c.backend)
        self.classifier = Linear(last, device=device, dtype=dtype)

    def auxiliary_loss(self) -> Tensor | float:
        loss: Tensor | float = self.body.auxiliary_loss()
        return loss

    def further_losses(self) -> dict[str, float]:
        losses: dict[str, float] = self.body.further_losses()
        return losses

    def states(self, tokens: Tensor, key_padding: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Returns the states (B, T, dim) of the tokens."""
        if key_padding is not None:
            seen = KeyPadding(key_padding)  # checks it
            if key_padding.shape != tokens.shape:
                raise ValueError(
                    f"{type(self).__name__}: key_padding must have the shape of tokens, got "
                    f"key_padding.shape={tuple(key_padding.shape)}, "
                    f"tokens.shape={tuple(tokens.shape)}"
                )
            if isinstance(self.body, Decoder):
                options = {"mask": seen, **options}
            else:
                options = {"key_padding": key_padding, **options}
        states: Tensor = self.body.hidden(tokens, **options)
        return states

    def _classified(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Returns the logits of states, or with labels the mean loss."""
        logits: Tensor = self.classifier(self.dropout(x))
        if labels is None:
            return logits
        return functional.cross_entropy(logits, labels, backend=self.config.backend)


class SequenceClassifier(_Classifier):
    """Gives each text a label: logits = f(pooled states) W + b.

    Args:
        config: model, number of labels, pooling and head.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, classes), or the mean loss with `labels` (B,).

    Example:
        >>> from omniattn.models import LlamaConfig
        >>> config = SequenceClassifierConfig(LlamaConfig(dim=48, num_layers=1), 3, pool="last")
        >>> SequenceClassifier(config)(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 3])
    """

    config: SequenceClassifierConfig

    def __init__(
        self,
        config: SequenceClassifierConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, config.bias, device=device, dtype=dtype)
        self.transform: Linear | None = None
        if config.activation is not None:
            dim = config.body.dim
            linear = Linear.Config(dim, dim, True, config.init_std, config.backend)
            self.transform = Linear(linear, device=device, dtype=dtype)

    def pooled(self, tokens: Tensor, key_padding: Tensor | None = None, **options: Any) -> Tensor:
        """Returns one state (B, dim) of each text; arguments as in `forward`."""
        model, pool = self.config.model, self.config.pool
        if isinstance(model, TextEncoderConfig) and model.first_is_global and pool == "first":
            options.setdefault("global_index", torch.zeros_like(tokens[:, :1]))
        x = self.states(tokens, key_padding, options)
        if pool == "first":
            return x[:, 0]
        if pool == "mean":
            if key_padding is None:
                return x.mean(1)
            real = key_padding[..., None].to(x.dtype)
            return (x * real).sum(1) / real.sum(1).clamp(min=1)
        if key_padding is None:
            return x[:, -1]
        places = torch.arange(tokens.shape[1], device=x.device)
        last = (places * key_padding).amax(1)
        return x[torch.arange(x.shape[0], device=x.device), last]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns logits (B, classes), or with labels the mean loss; -100 is ignored.

        Args:
            tokens: (B, T) int.
            labels: (B,) int.
            key_padding: (B, T) bool, True = real; no token sees the others.
            options: further arguments of the model's `hidden`, such as token_types.
        """
        x = self.pooled(tokens, key_padding, **options)
        if self.transform is not None:
            assert self.config.activation is not None
            x = _ACTIVATIONS[self.config.activation](self.transform(self.dropout(x)))
        return self._classified(x, labels)


class TokenClassifier(_Classifier):
    """Gives each token a label: logits = states W + b.

    Args:
        config: model and number of labels.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, T, classes), or the mean loss with `labels` (B, T).

    Example:
        >>> from omniattn.models import LlamaConfig
        >>> config = TokenClassifierConfig(LlamaConfig(dim=48, num_layers=1), 3)
        >>> TokenClassifier(config)(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 3])
    """

    config: TokenClassifierConfig

    def __init__(
        self,
        config: TokenClassifierConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, True, device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns logits (B, T, classes), or with labels the mean loss; -100 is ignored.

        Args:
            tokens: (B, T) int.
            labels: (B, T) int.
            key_padding: (B, T) bool, True = real; no token sees the others.
            options: further arguments of the model's `hidden`, such as token_types.
        """
        return self._classified(self.states(tokens, key_padding, options), labels)
