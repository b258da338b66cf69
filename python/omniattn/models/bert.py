"""BERT: a post-norm encoder for masked language modeling or classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import is_one_of, require_tensor
from omniattn.functional.masks import Mask
from omniattn.models.encoder import EncoderConfig
from omniattn.models.hf import Counterpart
from omniattn.models.model import Embedding, Model, require_token_ids
from omniattn.modules import (
    MLP,
    Attention,
    Dropout,
    LayerNorm,
    LearnedPositional,
    Linear,
    Residual,
)
from omniattn.modules.base.fields import Epsilon, Probability, Size

#: Our option -> transformers' option, for all heads.
HF_OPTIONS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "dropout_p": "hidden_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}
HF_WEIGHTS = (
    (r"^embed_tokens", "bert.embeddings.word_embeddings"),
    (r"^embed_positions", "bert.embeddings.position_embeddings"),
    (r"^embed_types", "bert.embeddings.token_type_embeddings"),
    (r"^embed_norm", "bert.embeddings.LayerNorm"),
    (r"^attentions\.(\d+)\.norm", r"bert.encoder.layer.\1.attention.output.LayerNorm"),
    (r"^attentions\.(\d+)\.layer\.o_proj", r"bert.encoder.layer.\1.attention.output.dense"),
    (r"^attentions\.(\d+)\.layer", r"bert.encoder.layer.\1.attention.self"),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"^mlps\.(\d+)\.norm", r"bert.encoder.layer.\1.output.LayerNorm"),
    (r"^mlps\.(\d+)\.layer\.up_proj", r"bert.encoder.layer.\1.intermediate.dense"),
    (r"^mlps\.(\d+)\.layer\.down_proj", r"bert.encoder.layer.\1.output.dense"),
)
HF_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": lambda c: c.dropout_p,
    "is_decoder": False,
}


@dataclass(frozen=True)
class BertSizes(EncoderConfig):
    """Sizes and options shared by BERT models with different heads.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim: sizes.
        max_positions: number of learned positions.
        token_types: number of token types (segments), each with an embedding.
        dropout_p: dropout of embeddings, attention weights and each layer's output.

    Reference:
        Devlin et al., "BERT", 2018, arXiv 1810.04805.
    """

    norm_eps: Epsilon = 1e-12
    vocab_size: Size = 257  # bytes and the mask
    dim: Size = 192
    num_layers: Size = 4
    num_heads: Size = 6
    hidden_dim: Size = 768
    max_positions: Size = 512
    token_types: Size = 2
    dropout_p: Probability = 0.0

    @property
    def longest(self) -> int:
        return self.max_positions


@dataclass(frozen=True)
class BertConfig(BertSizes):
    """Config of :class:`Bert`: the fields of :class:`BertSizes`."""

    architecture = "bert"
    hf = Counterpart(
        "BertForMaskedLM",
        HF_OPTIONS,
        (
            *HF_WEIGHTS,
            (r"^head_transform", "cls.predictions.transform.dense"),
            (r"^head_norm", "cls.predictions.transform.LayerNorm"),
            (r"^head_bias", "cls.predictions.bias"),
        ),
        fixed=HF_FIXED | {"tie_word_embeddings": True},
    )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Bert:
        return Bert(self, device=device, dtype=dtype)


@dataclass(frozen=True)
class BertClassifierConfig(BertSizes):
    """Config of :class:`BertClassifier`: the fields of :class:`BertSizes`, and `classes`."""

    architecture = "bert-classifier"
    hf = Counterpart(
        "BertForSequenceClassification",
        HF_OPTIONS | {"classes": "num_labels"},
        (
            *HF_WEIGHTS,
            (r"^pooler", "bert.pooler.dense"),
            (r"^head", "classifier"),
        ),
        fixed=HF_FIXED | {"classifier_dropout": None},
    )

    classes: Size = 2

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BertClassifier:
        return BertClassifier(self, device=device, dtype=dtype)


class BertEncoder(Model):
    """Computes x = LN(E[tokens] + P + S[types]), then post-norm blocks; subclasses add a head.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        config: BertSizes,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        c = config
        norm = c.layer_norm(c.dim)

        def table(name: str, rows: int) -> Embedding:
            return Embedding(rows, c.dim, c.init_std, name=name, device=device, dtype=dtype)

        def post_norm(layer: nn.Module) -> Residual:
            placement = Residual.Config(norm, "post", c.dropout_p)
            return Residual(layer, placement, device=device, dtype=dtype)

        attention = c.attention(c.dim, c.num_heads, c.dropout_p)
        mlp = c.mlp(c.dim, c.hidden_dim)
        self.embed_tokens = table("tokens", c.vocab_size)
        self.embed_types = table("token_types", c.token_types)
        positions = LearnedPositional.Config(c.max_positions, c.dim, c.init_std)
        self.embed_positions = LearnedPositional(positions, device=device, dtype=dtype)
        self.embed_norm = LayerNorm(norm, device=device, dtype=dtype)
        self.dropout = Dropout(c.dropout_p)
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        for _ in range(c.num_layers):
            self.attentions.append(post_norm(Attention(attention, device=device, dtype=dtype)))
            self.mlps.append(post_norm(MLP(mlp, device=device, dtype=dtype)))

    def hidden(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Returns the hidden states (B, T, dim); token_types (B, T) int, mask as in Attention."""
        op = type(self).__name__
        require_token_ids(op, "tokens", tokens)
        if token_types is not None:
            require_tensor(op, "token_types", token_types)
            if not is_one_of(token_types.shape, tokens.shape, (1, tokens.shape[1])):
                raise ValueError(
                    f"{op}: token_types must have the shape of tokens, got "
                    f"token_types.shape={tuple(token_types.shape)}, "
                    f"tokens.shape={tuple(tokens.shape)}"
                )
        types = torch.zeros_like(tokens) if token_types is None else token_types
        x = self.embed_positions(self.embed_tokens(tokens)) + self.embed_types(types)
        x = self.dropout(self.embed_norm(x))
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x, mask=mask))
        return x


class Bert(BertEncoder):
    """A masked language model: logits = LN(gelu(x W)) E^T + b, with x of :class:`BertEncoder`.

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

    config: BertConfig

    def __init__(
        self,
        config: BertConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.config = c = config
        self.head_transform = Linear(c.linear(c.dim, c.dim), device=device, dtype=dtype)
        self.head_norm = LayerNorm(c.layer_norm(c.dim), device=device, dtype=dtype)
        self.head_bias = nn.Parameter(torch.empty(c.vocab_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias of the head to 0."""
        nn.init.zeros_(self.head_bias)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss; -100 is ignored."""
        x = self.hidden(tokens, token_types=token_types, mask=mask)
        x = self.head_norm(nn.functional.gelu(self.head_transform(x)))
        weight, bias, backend = self.embed_tokens.weight, self.head_bias, self.config.backend
        if targets is None:
            return functional.linear(x, weight, bias, backend=backend)
        return functional.linear_cross_entropy(x, weight, targets, bias=bias, backend=backend)


class BertClassifier(BertEncoder):
    """A sequence classifier: logits = dropout(tanh(x_0 W_pool + b)) W_head + b.

    x_0 is the hidden state of the first token, [CLS], in :class:`BertEncoder`.

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
        self.config = c = config
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
