"""T5: an encoder-decoder with a relative position bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.models._states import require_states
from omniattn.models.head import head_logits, head_loss
from omniattn.models.hf import Conversion, Counterpart
from omniattn.models.model import Embedding, Model, ModelConfig, require_token_ids
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    Dropout,
    GatedMLP,
    Linear,
    Mixer,
    RMSNorm,
    State,
    T5RelativeBias,
)
from omniattn.modules.base.fields import Epsilon, Probability, Size
from omniattn.modules.base.state import Stateful, Storage, restored_on_error, takes_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class T5Config(ModelConfig):
    """Sizes and options of a T5.

    Args:
        vocab_size, dim, num_heads, head_dim, hidden_dim: sizes.
        num_layers: number of layers of the encoder and of the decoder.
        buckets, max_distance: buckets of relative positions, and distance of the last one.
        gated: GEGLU instead of ReLU, and an untied head (version 1.1).
        dropout_p: dropout of embeddings, attention weights, hidden layers and each layer's output.
        norm_eps: epsilon of the norms.
        residual_in_fp32: keep the residual stream in float32 if the weights have 16 bits.

    Reference:
        Raffel et al., "Exploring the Limits of Transfer Learning", 2020, arXiv 1910.10683.
    """

    architecture = "t5"
    hf = Counterpart(
        "T5ForConditionalGeneration",
        {
            "vocab_size": "vocab_size",
            "dim": "d_model",
            "num_layers": "num_layers",
            "num_heads": "num_heads",
            "head_dim": "d_kv",
            "hidden_dim": "d_ff",
            "buckets": "relative_attention_num_buckets",
            "max_distance": "relative_attention_max_distance",
            "dropout_p": "dropout_rate",
            "norm_eps": "layer_norm_epsilon",
        },
        (
            (r"^embed_tokens", "shared"),
            (r"coder\.relative", "coder.block.0.layer.0.SelfAttention.relative"),
            (r"coder\.norm", "coder.final_layer_norm"),
            (r"layers", "block"),
            (r"input_layernorm", "layer.0.layer_norm"),
            (r"mixer\.(.)_proj", r"layer.0.SelfAttention.\1"),
            (r"cross_attention_layernorm", "layer.1.layer_norm"),
            (r"cross_attn\.(.)_proj", r"layer.1.EncDecAttention.\1"),
            (r"(encoder.*)post_attention_layernorm", r"\1layer.1.layer_norm"),
            (r"(encoder.*)mlp", r"\1layer.1.DenseReluDense"),
            (r"(decoder.*)post_attention_layernorm", r"\1layer.2.layer_norm"),
            (r"(decoder.*)mlp", r"\1layer.2.DenseReluDense"),
            (r"gate_proj", "wi_0"),
            (r"down_proj", "wo"),
        ),
        fixed={
            "num_decoder_layers": lambda c: c.num_layers,
            "feed_forward_proj": lambda c: "gated-gelu" if c.gated else "relu",
            "scale_decoder_outputs": lambda c: not c.gated,
        },
        conversions=(Conversion(lambda _: {}, lambda theirs: {"gated": theirs.is_gated_act}),),
    )

    vocab_size: Size = 358  # bytes, sentinels, end and start
    dim: Size = 160
    num_layers: Size = 3
    num_heads: Size = 5
    head_dim: Size = 32
    hidden_dim: Size = 640
    buckets: int = 32
    max_distance: Size = 128
    gated: bool = False
    dropout_p: Probability = 0.0
    norm_eps: Epsilon = 1e-6
    residual_in_fp32: bool = False

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> T5:
        return T5(self, device=device, dtype=dtype)

    @property
    def counterpart(self) -> Counterpart:
        names = super().counterpart
        up = (r"up_proj", "wi_1" if self.gated else "wi")
        return replace(names, weights=(*names.weights, up))

    def build_hf(self) -> PreTrainedModel:
        model = super().build_hf()
        if self.gated:  # transformers ties the head until a checkpoint has a weight for it
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        return model

    @property
    def norm(self) -> RMSNorm.Config:
        """Config of all norms."""
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    def block(self, *, decoder: bool) -> DecoderBlock.Config:
        """Returns the config of a layer; decoder layers are causal and attend to the encoder."""

        def attention(*, causal: bool, cross: bool) -> Attention.Config:
            return Attention.Config(
                self.dim,
                self.num_heads,
                head_dim=self.head_dim,
                causal=causal,
                cross=cross,
                scale=1.0,
                dropout_p=self.dropout_p,
                init_std=self.dim**-0.5,
                # Scores are not divided by sqrt(D), so the initial query weights are.
                q_init_std=(self.dim * self.head_dim) ** -0.5,
                out_init_std=(self.num_heads * self.head_dim) ** -0.5,
                backend=self.backend,
            )

        feed_forward = GatedMLP.Config if self.gated else MLP.Config
        mlp = feed_forward(
            self.dim,
            self.hidden_dim,
            "geglu_tanh" if self.gated else "relu",
            bias=False,
            init_std=self.dim**-0.5,
            out_init_std=self.hidden_dim**-0.5,
            dropout_p=self.dropout_p,
            backend=self.backend,
        )
        return DecoderBlock.Config(
            attention(causal=decoder, cross=False),
            mlp,
            self.norm,
            cross=attention(causal=False, cross=True) if decoder else None,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )


class T5Stack(nn.Module):
    """The encoder or decoder: blocks that share one relative position bias, and a norm.

    Args:
        config: config of the model.
        decoder: True for causal blocks with cross-attention.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), memory (B, S, dim) -> (B, T, dim).
    """

    def __init__(
        self,
        config: T5Config,
        *,
        decoder: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        c = config
        bias = T5RelativeBias.Config(
            c.num_heads, c.buckets, c.max_distance, not decoder, init_std=c.dim**-0.5
        )
        self.relative_attention_bias = T5RelativeBias(bias, device=device, dtype=dtype)
        block = c.block(decoder=decoder)
        self.layers = nn.ModuleList(
            DecoderBlock(block, device=device, dtype=dtype) for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.norm, device=device, dtype=dtype)
        self.dropout = Dropout(c.dropout_p)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        state: list[tuple[State, State]] | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to normed states (B, T, dim); mask of the self-attention."""
        relative = self.relative_attention_bias()
        x, residual = self.dropout(x), None
        for i, layer in enumerate(self.layers):
            own, other = (None, None) if state is None else state[i]
            x, residual = layer(
                x,
                residual,
                state=own,
                mask=mask,
                relative=relative,
                memory=memory,
                memory_state=other,
            )
        return self.dropout(self.norm(x, residual)[0])


class T5(Model, Stateful):
    """Computes logits = head(Decoder(E[tokens], Encoder(E[source]))).

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        source (B, S), tokens (B, T) int -> logits (B, T, vocab_size), or the mean loss with
        `targets` (B, T). Tokens are a start token and the targets, shifted right by one.

    Example:
        >>> model = T5(T5Config(dim=32, num_layers=1, hidden_dim=64))
        >>> model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)).shape
        torch.Size([1, 3, 358])
    """

    config: T5Config

    def __init__(
        self,
        config: T5Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.embed_tokens = Embedding(c.vocab_size, c.dim, 1.0, device=device, dtype=dtype)
        self.encoder = T5Stack(c, decoder=False, device=device, dtype=dtype)
        self.decoder = T5Stack(c, decoder=True, device=device, dtype=dtype)
        head = Linear.Config(c.dim, c.vocab_size, init_std=c.dim**-0.5, backend=c.backend)
        self.lm_head = Linear(head, device=device, dtype=dtype) if c.gated else None

    def encode(self, source: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Encodes source (B, S) int to hidden states (B, S, dim)."""
        require_token_ids("T5", "source", source)
        states: Tensor = self.encoder(self.embed_tokens(source), mask=mask)
        return states

    def new_state(
        self, batch: int, max_length: int, **storage: Unpack[Storage]
    ) -> list[tuple[State, State]]:
        """Returns empty states of the decoder's layers, for self- and cross-attention."""

        def new(mixer: Mixer) -> State:
            state: State = mixer.new_state(batch, max_length, **storage)
            return state

        layers = [cast(DecoderBlock, layer) for layer in self.decoder.layers]
        return [(new(layer.mixer), new(cast(Mixer, layer.cross_attn))) for layer in layers]

    @takes_cache
    def hidden(
        self,
        tokens: Tensor,
        memory: Tensor,
        *,
        state: list[tuple[State, State]] | None = None,
    ) -> Tensor:
        """Returns the decoder's hidden states (B, T, dim); `memory` has the encoder's."""
        require_token_ids("T5", "tokens", tokens)
        if memory.dim() != 3 or memory.shape[0] != tokens.shape[0]:
            raise ValueError(
                "T5: the encoder's states must have shape (B, S, dim) with the B of tokens, "
                f"got {tuple(memory.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        if state is not None:
            require_states("T5", state, len(self.decoder.layers), tokens.shape[1])
        with restored_on_error(state):
            x: Tensor = self.decoder(self.embed_tokens(tokens), memory, state=state)
        return x * self.config.dim**-0.5 if self.lm_head is None else x

    @property
    def head_weight(self) -> Tensor:
        """Weight (vocab_size, dim) of the head."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def head(self, x: Tensor) -> Tensor:
        """Maps hidden states (..., dim) to logits (..., vocab_size)."""
        return head_logits(self, x)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss; -100 is ignored."""
        x = self.hidden(tokens, self.encode(source))
        if targets is None:
            return self.head(x)
        return head_loss(self, x, targets)
