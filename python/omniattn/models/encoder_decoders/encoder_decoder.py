"""The encoder-decoder shared by all such architectures; an architecture is a Config for it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.functional.masks import KeyPadding, Mask
from omniattn.models._states import require_states
from omniattn.models.head import head_logits, head_loss
from omniattn.models.model import Embedding, Model, ModelConfig, require_token_ids
from omniattn.modules import DecoderBlock, Dropout, Linear, Mixer, State, T5RelativeBias
from omniattn.modules.base.fields import Probability, Size
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig
from omniattn.modules.base.state import Stateful, Storage, takes_cache


class Stack(nn.Module):
    """The encoder or decoder: positions, blocks and a final norm.

    Args:
        config: config of the model.
        decoder: True for causal blocks with cross-attention.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim), memory (B, S, dim) -> (B, T, dim).
    """

    def __init__(
        self,
        config: EncoderDecoder.Config,
        *,
        decoder: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        c, factory = config, {"device": device, "dtype": dtype}
        self.offset = c.position_offset

        def optional(part: LayerConfig | None, **options: Any) -> nn.Module | None:
            built: nn.Module | None = None if part is None else part.build(**options)
            return built

        bias = c.relative_bias(decoder=decoder)
        self.relative_attention_bias: T5RelativeBias | None = None
        if bias is not None:
            self.relative_attention_bias = T5RelativeBias(bias, device=device, dtype=dtype)
        # A sinusoidal table has no parameters and takes no device.
        learned = c.positions is not None and hasattr(c.positions, "max_positions")
        self.embed_positions = optional(c.positions, **(factory if learned else {}))
        self.embed_norm = optional(c.embedding_norm, **factory)
        self.layers = nn.ModuleList(
            DecoderBlock(c.block(layer, decoder=decoder), device=device, dtype=dtype)
            for layer in range(c.depth(decoder=decoder))
        )
        self.norm = optional(c.norm, **factory)
        self.dropout = Dropout(c.dropout_p)
        self.output_dropout = Dropout(c.dropout_p if c.drops_output else 0.0)

    def embed(self, table: Embedding, tokens: Tensor, past: int = 0) -> Tensor:
        """Maps tokens (B, T), which follow `past` others, to their embeddings (B, T, dim)."""
        rows, sequences = sequences_of("EncoderDecoder", "tokens", tokens, dim=False)
        x: Tensor = table(rows)
        if self.embed_positions is not None:
            x = self.embed_positions(x, self.offset + past + sequences.positions(rows))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return sequences.restored(self.dropout(x))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        state: list[tuple[State, State]] | None = None,
    ) -> Tensor:
        """Maps embeddings x (B, T, dim) to hidden states (B, T, dim); mask of self-attention."""
        bias, residual = self.relative_attention_bias, None
        relative = None if bias is None else bias()
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
                memory_mask=memory_mask,
            )
        if self.norm is not None:
            x = self.norm(x) if residual is None else self.norm(x, residual)[0]
        elif residual is not None:
            x = x + residual
        y: Tensor = self.output_dropout(x)
        return y


class EncoderDecoder(Model, Stateful):
    """Computes logits = head(Decoder(E[tokens], Encoder(E[source]))).

    Args:
        config: sizes and the parts that an architecture defines.
        device, dtype: of the parameters.

    Shape:
        source (B, S), tokens (B, T) int -> logits (B, T, vocab_size), or the mean loss with
        `targets` (B, T). Tokens are a start token and the targets, shifted right by one.

    Example:
        >>> from omniattn.models import TransformerConfig
        >>> model = EncoderDecoder(TransformerConfig(dim=32, num_layers=1, num_heads=2))
        >>> model(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)).shape
        torch.Size([1, 3, 358])
    """

    @dataclass(frozen=True)
    class Config(ModelConfig):
        """Sizes; an architecture adds its own fields and defines its blocks.

        Args:
            vocab_size, dim: sizes.
            num_layers: number of layers of the encoder, and of the decoder without decoder_layers.
            decoder_layers: number of layers of the decoder, None for num_layers.
            label_smoothing: share of the targets' probability that the loss in training spreads
                over all tokens; the loss in evaluation has none.
        """

        vocab_size: Size = 358  # bytes, sentinels, end and start
        dim: Size = 160
        num_layers: Size = 3
        decoder_layers: Size | None = field(default=None, kw_only=True)
        label_smoothing: Probability = field(default=0.0, kw_only=True)

        #: Dropout of the embeddings.
        dropout_p = 0.0
        #: Added to positions before they select rows of the learned table.
        position_offset = 0
        #: True if dropout also follows the final norm.
        drops_output = False
        #: True for a bias (vocab_size,) of the logits, which is a buffer and is not trained.
        head_bias = False

        @abstractmethod
        def block(self, layer: int, *, decoder: bool) -> DecoderBlock.Config:
            """Returns the config of layer number `layer`; a layer of a decoder has `cross`."""

        @property
        def norm(self) -> LayerConfig | None:
            """Config of the norm after each stack, None for none."""
            return None

        @property
        def positions(self) -> LayerConfig | None:
            """Config of the position embedding of each stack, None for none."""
            return None

        @property
        def embedding_norm(self) -> LayerConfig | None:
            """Config of the norm of each stack's embeddings, None for none."""
            return None

        def relative_bias(self, *, decoder: bool) -> T5RelativeBias.Config | None:
            """Returns the config of a stack's relative position bias, None for none."""
            return None

        @property
        def tied(self) -> bool:
            """True if the head shares the embedding's weight."""
            return True

        @property
        def embedding_scale(self) -> float:
            """Factor of the token embeddings."""
            return 1.0

        @property
        def embedding_std(self) -> float:
            """Standard deviation of the initial token embeddings."""
            return 0.02

        @property
        def head_std(self) -> float:
            """Standard deviation of the initial weight of an untied head."""
            return 0.02

        @property
        def output_scale(self) -> float:
            """Factor of the decoder's states before the head."""
            return 1.0

        def depth(self, *, decoder: bool) -> int:
            """Returns the number of layers of the encoder or decoder."""
            own = self.decoder_layers if decoder else None
            return self.num_layers if own is None else own

        def build(
            self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
        ) -> EncoderDecoder:
            return EncoderDecoder(self, device=device, dtype=dtype)

    config: Config
    head_bias: Tensor | None

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.embed_tokens = Embedding(
            *(c.vocab_size, c.dim, c.embedding_std),
            scale=c.embedding_scale,
            device=device,
            dtype=dtype,
        )
        self.encoder: Any = self._new_encoder(device=device, dtype=dtype)
        self.decoder = Stack(c, decoder=True, device=device, dtype=dtype)
        head = Linear.Config(c.dim, c.vocab_size, init_std=c.head_std, backend=c.backend)
        self.lm_head = None if c.tied else Linear(head, device=device, dtype=dtype)
        bias = torch.empty(c.vocab_size, device=device, dtype=dtype) if c.head_bias else None
        self.register_buffer("head_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias of the logits to 0."""
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    def _new_encoder(self, **factory: Any) -> nn.Module:
        """Builds the encoder; `factory`: device and dtype."""
        return Stack(self.config, decoder=False, **factory)

    def _require_ids(self, name: str, tokens: Tensor, past: int = 0) -> None:
        """Requires integers (B, T), not more than the model has positions."""
        op, most = type(self).__name__, self.config.longest
        require_token_ids(op, name, tokens)
        if most is not None and not tokens.is_nested and past + tokens.shape[1] > most:
            raise ValueError(
                f"{op}: {name} must be at most {most}, the number of positions, "
                f"got {past + tokens.shape[1]} tokens"
            )

    def encode(self, source: Tensor, *, mask: Tensor | Mask | None = None) -> Tensor:
        """Encodes source (B, S) int to hidden states (B, S, dim)."""
        self._require_ids("source", source)
        states: Tensor = self.encoder(self.encoder.embed(self.embed_tokens, source), mask=mask)
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
        memory_mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Returns the decoder's hidden states (B, T, dim) for the head.

        Args:
            tokens: (B, T) int.
            memory: (B, S, dim), result of `encode`.
            state: from `new_state`; the tokens are appended to it, and it keeps keys and values of
                the memory.
            memory_mask: mask of the cross-attention, as in Attention.
        """
        op = type(self).__name__
        self._require_ids("tokens", tokens)
        if memory.dim() != 3 or memory.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"{op}: the encoder's states must have shape (B, S, dim) with the B of tokens, "
                f"got {tuple(memory.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        past = 0
        if state is not None:
            past = require_states(op, state, len(self.decoder.layers), tokens.shape[1])
            self._require_ids("tokens", tokens, past)
        x = self.decoder.embed(self.embed_tokens, tokens, past)
        x = self.decoder(x, memory, memory_mask=memory_mask, state=state)
        scale = self.config.output_scale
        return x if scale == 1.0 else x * scale

    @property
    def head_weight(self) -> Tensor:
        """Weight (vocab_size, dim) of the head."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def head(self, x: Tensor) -> Tensor:
        """Maps hidden states (..., dim) to logits (..., vocab_size)."""
        return head_logits(self, x, self.head_bias)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss.

        Args:
            source, tokens: (B, S) and (B, T) int, inputs of the encoder and of the decoder.
            targets: (B, T), next token of each position; -100 is ignored.
            source_mask: (B, S) bool, False for padding of the source.
        """
        mask = None if source_mask is None else KeyPadding(source_mask)
        x = self.hidden(tokens, self.encode(source, mask=mask), memory_mask=mask)
        if targets is None:
            return self.head(x)
        smoothing = self.config.label_smoothing if self.training else 0.0
        return head_loss(self, x, targets, self.head_bias, label_smoothing=smoothing)
