"""BERT: a post-norm encoder for masked language modeling or classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.models.encoders.text_encoder import (
    HF_FIXED,
    HF_OPTIONS,
    TextEncoder,
    TextEncoderConfig,
    hf_weights,
)
from omniattn.models.hf import Counterpart, Renames
from omniattn.modules import LayerNorm, Linear
from omniattn.modules.base.fields import Size

#: Names of the head's weights in transformers.
HF_HEAD: Renames = (
    (r"^head_transform", "cls.predictions.transform.dense"),
    (r"^head_norm", "cls.predictions.transform.LayerNorm"),
    (r"^head_bias", "cls.predictions.bias"),
)
_FIXED = HF_FIXED | {"is_decoder": False}


@dataclass(frozen=True)
class MaskedConfig(TextEncoderConfig):
    """Sizes and options shared by encoders that restore masked tokens.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim: sizes.
        max_positions: number of learned positions.
        token_types: number of token types (segments), each with an embedding.
        dropout_p: dropout of embeddings, attention weights and each layer's output.
    """

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Bert:
        return Bert(self, device=device, dtype=dtype)


@dataclass(frozen=True)
class BertConfig(MaskedConfig):
    """Config of :class:`Bert`.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim: sizes.
        max_positions: number of learned positions.
        token_types: number of token types (segments), each with an embedding.
        dropout_p: dropout of embeddings, attention weights and each layer's output.

    Reference:
        Devlin et al., "BERT", 2018, arXiv 1810.04805.
    """

    architecture = "bert"
    hf = Counterpart(
        "BertForMaskedLM",
        HF_OPTIONS,
        (*hf_weights("bert"), *HF_HEAD),
        fixed=_FIXED | {"tie_word_embeddings": True},
    )


@dataclass(frozen=True)
class BertClassifierConfig(TextEncoderConfig):
    """Config of :class:`BertClassifier`: the fields of :class:`BertConfig`, and `classes`."""

    architecture = "bert-classifier"
    hf = Counterpart(
        "BertForSequenceClassification",
        HF_OPTIONS | {"classes": "num_labels"},
        (
            *hf_weights("bert"),
            (r"^pooler", "bert.pooler.dense"),
            (r"^head", "classifier"),
        ),
        fixed=_FIXED | {"classifier_dropout": None},
    )

    classes: Size = 2

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BertClassifier:
        return BertClassifier(self, device=device, dtype=dtype)


class Bert(TextEncoder):
    """A masked language model: logits = LN(gelu(x W)) E^T + b, with the encoder's states x.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, T, vocab_size), or the mean loss with `targets` (B, T).

    Example:
        >>> model = Bert(BertConfig(dim=48, num_layers=1))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 257])
    """

    config: MaskedConfig

    def __init__(
        self,
        config: MaskedConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c, width = config, config.embedding_dim
        self.head_transform = Linear(c.linear(c.dim, width), device=device, dtype=dtype)
        self.head_norm = LayerNorm(c.layer_norm(width), device=device, dtype=dtype)
        self.head_bias = nn.Parameter(torch.empty(c.vocab_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias of the head to 0."""
        nn.init.zeros_(self.head_bias)

    def states(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the states (B, T, dim) that the head reads; arguments as in `hidden`."""
        options |= {"token_types": token_types, "mask": mask, "key_padding": key_padding}
        return self.hidden(tokens, **options)

    def head(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Maps states (..., dim) to logits (..., vocab_size), or with targets to the mean loss."""
        approximate = "tanh" if self.config.activation == "gelu_tanh" else "none"
        x = nn.functional.gelu(self.head_transform(x), approximate=approximate)
        x = self.head_norm(x)
        weight, bias, backend = self.embed_tokens.weight, self.head_bias, self.config.backend
        if targets is None:
            return functional.linear(x, weight, bias, backend=backend)
        return functional.linear_cross_entropy(x, weight, targets, bias=bias, backend=backend)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss; -100 is ignored.

        Args:
            tokens: (B, T) int.
            targets: (B, T) int.
            token_types: (B, T) int, default 0.
            mask: as in Attention.
            key_padding: (B, T) bool, True = real; no token sees the others.
            options: further arguments of the token mixers, such as global_index of Longformer.
        """
        options |= {"token_types": token_types, "mask": mask, "key_padding": key_padding}
        return self.head(self.states(tokens, **options), targets)


class BertClassifier(TextEncoder):
    """A sequence classifier: logits = dropout(tanh(x_0 W_pool + b)) W_head + b.

    x_0 is the encoder's state of the first token, [CLS].

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, classes), or the mean loss with `labels` (B,).

    Example:
        >>> model = BertClassifier(BertClassifierConfig(dim=48, num_layers=1, classes=3))
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 3])
    """

    config: BertClassifierConfig

    def __init__(
        self,
        config: BertClassifierConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        self.pooler = Linear(c.linear(c.dim, c.dim), device=device, dtype=dtype)
        self.head = Linear(c.linear(c.dim, c.classes), device=device, dtype=dtype)

    def pooled(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Returns tanh(x_0 W_pool + b), one vector (B, dim) for each sequence."""
        x = self.hidden(tokens, token_types=token_types, mask=mask)
        return torch.tanh(self.pooler(x[:, 0]))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Returns logits (B, classes), or with labels the mean loss."""
        pooled = self.pooled(tokens, token_types=token_types, mask=mask)
        logits: Tensor = self.head(self.dropout(pooled))
        if labels is None:
            return logits
        return functional.cross_entropy(logits, labels, backend=self.config.backend)
