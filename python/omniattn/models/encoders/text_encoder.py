"""Text encoders with learned positions and post-norm layers: the body of BERT and its kin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import is_one_of, require_tensor
from omniattn.functional.masks import BoolMask, KeyPadding, Mask
from omniattn.models.encoders.encoder import EncoderConfig
from omniattn.models.hf import Renames
from omniattn.models.model import Embedding, Model, require_token_ids
from omniattn.modules import MLP, Dropout, LayerNorm, LearnedPositional, Linear, Residual
from omniattn.modules.base.fields import Epsilon, Probability, Size
from omniattn.modules.base.layer import LayerConfig

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
HF_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": lambda c: c.dropout_p,
}


def hf_weights(prefix: str) -> Renames:
    """Returns the names of the body's weights in a transformers model that calls it `prefix`."""
    layer = rf"{prefix}.encoder.layer.\1"
    return (
        (r"^embed_tokens", f"{prefix}.embeddings.word_embeddings"),
        (r"^embed_positions", f"{prefix}.embeddings.position_embeddings"),
        (r"^embed_types", f"{prefix}.embeddings.token_type_embeddings"),
        (r"^embed_norm", f"{prefix}.embeddings.LayerNorm"),
        (r"^embed_proj", f"{prefix}.embeddings_project"),
        (r"^attentions\.(\d+)\.norm", rf"{layer}.attention.output.LayerNorm"),
        (r"^attentions\.(\d+)\.layer\.o_proj", rf"{layer}.attention.output.dense"),
        (r"^attentions\.(\d+)\.layer", rf"{layer}.attention.self"),
        (r"q_proj", "query"),
        (r"k_proj", "key"),
        (r"v_proj", "value"),
        (r"^mlps\.(\d+)\.norm", rf"{layer}.output.LayerNorm"),
        (r"^mlps\.(\d+)\.layer\.up_proj", rf"{layer}.intermediate.dense"),
        (r"^mlps\.(\d+)\.layer\.down_proj", rf"{layer}.output.dense"),
    )


@dataclass(frozen=True)
class TextEncoderConfig(EncoderConfig):
    """Sizes and options shared by text encoders with different layers and heads.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim: sizes.
        max_positions: number of learned positions.
        token_types: number of token types (segments), each with an embedding.
        dropout_p: dropout of embeddings, attention weights and each layer's output.
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

    #: Activation of the feed-forward layers and of the head.
    activation: ClassVar[str] = "gelu"
    #: True if the token mixers take key_padding, as those with a pattern do.
    takes_key_padding: ClassVar[bool] = False
    #: True if a classifier of texts makes their first token global by default.
    first_is_global: ClassVar[bool] = False
    #: True if the dropout of the embeddings comes before their norm.
    drops_before_norm: ClassVar[bool] = False

    @property
    def embedding_dim(self) -> int:
        """Width of the embeddings; a linear layer maps another width than `dim` to it."""
        return self.dim

    @property
    def padding_id(self) -> int | None:
        """Token that takes no position, or None to count every token.

        Positions of other tokens start at `padding_id` + 1, as in RoBERTa.
        """
        return None

    @property
    def adds_positions(self) -> bool:
        """True if embeddings of positions are added to those of the tokens."""
        return True

    @property
    def longest(self) -> int:
        unused = 0 if self.padding_id is None else self.padding_id + 1
        return self.max_positions - unused

    def mixer(self, layer: int) -> LayerConfig:
        """Returns the config of a layer's token mixer."""
        return self.attention(self.dim, self.num_heads, self.dropout_p)

    @property
    def feed_forward(self) -> MLP.Config:
        """Config of a layer's channel mixer."""
        return replace(self.mlp(self.dim, self.hidden_dim), activation=self.activation)

    def build_body(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TextEncoder:
        return TextEncoder(self, device=device, dtype=dtype)


class TextEncoder(Model):
    """Computes x = LN(E[tokens] + P + S[types]), then post-norm blocks; subclasses add a head.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.
    """

    config: Any

    def __init__(
        self,
        config: TextEncoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        norm, width = c.layer_norm(c.dim), c.embedding_dim

        def table(name: str, rows: int) -> Embedding:
            return Embedding(rows, width, c.init_std, name=name, device=device, dtype=dtype)

        def post_norm(layer: nn.Module) -> Residual:
            placement = Residual.Config(norm, "post", c.dropout_p)
            return Residual(layer, placement, device=device, dtype=dtype)

        self.embed_tokens = table("tokens", c.vocab_size)
        self.embed_types = table("token_types", c.token_types) if c.token_types else None
        self.embed_positions: LearnedPositional | None = None
        if c.adds_positions:
            positions = LearnedPositional.Config(c.max_positions, width, c.init_std)
            self.embed_positions = LearnedPositional(positions, device=device, dtype=dtype)
        self.embed_norm = LayerNorm(c.layer_norm(width), device=device, dtype=dtype)
        self.embed_proj: Linear | None = None
        if width != c.dim:
            self.embed_proj = Linear(c.linear(width, c.dim), device=device, dtype=dtype)
        self.dropout = Dropout(c.dropout_p)
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        for layer in range(c.num_layers):
            self.attentions.append(post_norm(c.mixer(layer).build(device=device, dtype=dtype)))
            self.mlps.append(post_norm(MLP(c.feed_forward, device=device, dtype=dtype)))

    def embed(self, tokens: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Returns the input (B, T, dim) of the first layer; arguments as in `hidden`."""
        op, pad = type(self).__name__, self.config.padding_id
        require_token_ids(op, "tokens", tokens)
        x: Tensor = self.embed_tokens(tokens)
        if self.embed_positions is not None and pad is None:
            x = self.embed_positions(x)
        elif self.embed_positions is not None:
            real = tokens != pad
            x = self.embed_positions(x, real.cumsum(1) * real + pad)
        if token_types is not None:
            require_tensor(op, "token_types", token_types)
            if self.embed_types is None:
                raise ValueError(f"{op}: token_types must be None with a config of token_types=0")
            if not is_one_of(token_types.shape, tokens.shape, (1, tokens.shape[1])):
                raise ValueError(
                    f"{op}: token_types must have the shape of tokens, got "
                    f"token_types.shape={tuple(token_types.shape)}, "
                    f"tokens.shape={tuple(tokens.shape)}"
                )
        if self.embed_types is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.embed_types(types)
        if self.config.drops_before_norm:
            x = self.embed_norm(self.dropout(x))
        else:
            x = self.dropout(self.embed_norm(x))
        if self.embed_proj is not None:
            x = self.embed_proj(x)
        return x

    def encode(
        self,
        x: Tensor,
        *,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Maps embeddings (B, T, dim) through all layers; arguments as in `hidden`."""
        given = options | self._seen(x, mask, key_padding)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x, **given))
        return x

    def _seen(
        self, x: Tensor, mask: Tensor | Mask | None, key_padding: Tensor | None
    ) -> dict[str, Any]:
        """Returns the mixers' arguments for the keys that queries see."""
        if key_padding is None:
            return {"mask": mask}
        op, real = type(self).__name__, KeyPadding(key_padding)
        if key_padding.shape != x.shape[:2]:
            raise ValueError(
                f"{op}: key_padding must have the shape of tokens, got "
                f"key_padding.shape={tuple(key_padding.shape)}, tokens.shape={tuple(x.shape[:2])}"
            )
        if self.config.takes_key_padding:
            return {"mask": mask, "key_padding": key_padding}
        if mask is None:
            return {"mask": real}
        return {"mask": real & (BoolMask(mask) if isinstance(mask, Tensor) else mask)}

    def hidden(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the hidden states (B, T, dim).

        Args:
            tokens: (B, T) int.
            token_types: (B, T) int, default 0.
            mask: as in Attention.
            key_padding: (B, T) bool, True = real; no token sees the others.
            options: further arguments of the token mixers, such as global_index of Longformer.
        """
        x = self.embed(tokens, token_types)
        return self.encode(x, mask=mask, key_padding=key_padding, **options)
