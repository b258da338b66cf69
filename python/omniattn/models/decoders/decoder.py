"""The decoder shared by all decoder-only architectures; an architecture is a Config for it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.functional.scores.score_mod import MaskMod, ScoreMod
from omniattn.models._states import require_states
from omniattn.models.head import head_logits, head_loss
from omniattn.models.model import Embedding, Model, ModelConfig
from omniattn.modules import (
    Attention,
    DecoderBlock,
    Dropout,
    Eviction,
    LearnedPositional,
    Linear,
    MultiTokenPredictor,
    RotaryEmbedding,
    State,
)
from omniattn.modules.base.fields import Probability, Size
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig
from omniattn.modules.base.state import Stateful, Storage, takes_cache
from omniattn.modules.experts.auxiliary import AuxiliaryLoss


def _takes_score_mod(layer: nn.Module) -> bool:
    return isinstance(layer, DecoderBlock) and layer.mixer.takes_score_mod


def _head_of_streams(config: Any, **factory: Any) -> nn.Module | None:
    """Builds the end of the blocks' residual streams, None for the plain residual stream."""
    streams: Any = config.block(0).streams if config.num_layers else None
    if streams is None:
        return None
    end: nn.Module = replace(streams, head=True).build(**factory)
    return end


class Decoder(Model, Stateful):
    """Computes x = E[tokens] (+ P[positions]), the blocks, the norm and logits = x W_head^T.

    Args:
        config: sizes and the parts that an architecture defines.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int, or jagged (B, j) -> logits (B, T, vocab_size), or the mean loss with
        `targets` (B, T).

    Notes:
        The loss uses `linear_cross_entropy`, which never stores logits (B * T, vocab_size).
    """

    @dataclass(frozen=True)
    class Config(ModelConfig):
        """Sizes; an architecture adds its own fields and defines its blocks.

        Args:
            vocab_size, dim, num_layers: sizes.
            tie_embeddings: the head shares the embedding's weight.
            init_std: standard deviation of all initial weights; divided by sqrt(2 num_layers) for
                projections onto the residual stream.
            dropout_p: dropout of the embeddings and of each layer's output.
            gradient_checkpointing: save only each block's input and recompute it in backward.
            residual_in_fp32: keep the residual stream in float32 if the weights have 16 bits.
        """

        vocab_size: Size = 256
        dim: Size = 192
        num_layers: Size = 4
        tie_embeddings: bool = False
        init_std: float = 0.02
        dropout_p: Probability = 0.0
        gradient_checkpointing: bool = False
        residual_in_fp32: bool = False

        @abstractmethod
        def block(self, layer: int) -> DecoderBlock.Config:
            """Returns the config of a layer, counted from 0."""

        @property
        @abstractmethod
        def norm(self) -> LayerConfig:
            """Config of the norm before the head."""

        @property
        def rope(self) -> RotaryEmbedding.Config | None:
            """Config of the rotary embedding of all layers."""
            return None

        @property
        def positions(self) -> LearnedPositional.Config | None:
            """Config of the position embedding added to the token embedding."""
            return None

        @property
        def embedding_norm(self) -> LayerConfig | None:
            """Config of the norm of the embeddings, or None without one."""
            return None

        @property
        def embedding_scale(self) -> float:
            """Factor of the token embeddings."""
            return 1.0

        @property
        def predictor(self) -> MultiTokenPredictor.Config | None:
            """Config of multi-token prediction; its blocks use layer `num_layers`'s config."""
            return None

        @property
        def predictor_weight(self) -> float:
            """Weight of the predictor's loss in training."""
            return 0.3

        @property
        def longest(self) -> int | None:
            return None if self.positions is None else self.positions.max_positions

        @property
        def common(self) -> dict[str, Any]:
            """Options that the configs of all layers share."""
            out_init_std = self.init_std / math.sqrt(2 * max(self.num_layers, 1))
            return {
                "init_std": self.init_std,
                "out_init_std": out_init_std,
                "backend": self.backend,
            }

        def build(
            self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
        ) -> Decoder:
            return Decoder(self, device=device, dtype=dtype)

        def build_body(
            self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
        ) -> Decoder:
            # A tied head has no weights of its own.
            body = replace(self, tie_embeddings=True).build(device=device, dtype=dtype)
            body.predictor = None
            return body

    config: Config

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
            c.vocab_size, c.dim, c.init_std, scale=c.embedding_scale, device=device, dtype=dtype
        )
        self.embed_positions = (
            None
            if c.positions is None
            else LearnedPositional(c.positions, device=device, dtype=dtype)
        )
        self.embed_norm: nn.Module | None = None
        if c.embedding_norm is not None:
            self.embed_norm = c.embedding_norm.build(device=device, dtype=dtype)
        self.dropout = Dropout(c.dropout_p)
        self.rotary = None if c.rope is None else RotaryEmbedding(c.rope)
        self.layers = nn.ModuleList(self._blocks(device=device, dtype=dtype))
        self.collapse = _head_of_streams(c, device=device, dtype=dtype)
        self.norm = c.norm.build(device=device, dtype=dtype)
        head = Linear.Config(c.dim, c.vocab_size, init_std=c.init_std, backend=c.backend)
        self.lm_head = None if c.tie_embeddings else Linear(head, device=device, dtype=dtype)
        self.predictor: MultiTokenPredictor | None = None
        if c.predictor is not None:

            def block() -> DecoderBlock:
                return DecoderBlock(c.block(c.num_layers), device=device, dtype=dtype)

            self.predictor = MultiTokenPredictor(c.predictor, block, device=device, dtype=dtype)
        self._predictor_loss: torch.Tensor | float = 0.0

    def _blocks(self, **factory: Any) -> Iterable[nn.Module]:
        """Builds the layers; `factory`: device and dtype."""
        c = self.config
        return (DecoderBlock(c.block(layer), **factory) for layer in range(c.num_layers))

    def __getstate__(self) -> dict[str, Any]:
        # Drops the last forward's loss: tensors of a graph can be neither copied nor pickled.
        return self.__dict__ | {"_predictor_loss": 0.0}

    def auxiliary_loss(self) -> torch.Tensor | float:
        """Returns the loss of multi-token prediction, if any, plus the layers' own losses."""
        total = self.config.predictor_weight * self._predictor_loss
        for layer in self._trained_apart():
            assert layer.auxiliary is not None
            total = total + layer.auxiliary_weight * layer.auxiliary
        return total

    def _trained_apart(self) -> list[AuxiliaryLoss]:
        """Returns the layers with a loss of their own in the last forward."""
        layers = (module for module in self.modules() if isinstance(module, AuxiliaryLoss))
        return [layer for layer in layers if layer.auxiliary is not None]

    def further_losses(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.predictor is not None:
            found["mtp"] = torch.as_tensor(self._predictor_loss).item()
        layers = self._trained_apart()
        for name in sorted({layer.auxiliary_name for layer in layers}):
            losses = [layer.auxiliary for layer in layers if layer.auxiliary_name == name]
            found[name] = sum(loss.item() for loss in losses if loss is not None) / len(losses)
        return found

    def new_state(
        self,
        batch: int,
        max_length: int,
        *,
        eviction: Eviction | Sequence[Eviction] | None = None,
        kv_dtype: torch.dtype | None = None,
        **storage: Unpack[Storage],
    ) -> list[State]:
        """Returns the empty states of all layers; `eviction` and `kv_dtype` as in
        `Attention.new_state`."""
        options: dict[str, Any] = dict(storage)
        for name, given in (("eviction", eviction), ("kv_dtype", kv_dtype)):
            if given is None:
                continue
            if not any(isinstance(module, Attention) for module in self.layers.modules()):
                raise ValueError(f"Decoder: {name} needs a layer of Attention, got none")
            options[name] = given
        blocks = (cast(Stateful, layer) for layer in self.layers)
        return [block.new_state(batch, max_length, **options) for block in blocks]

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight (vocab_size, dim) of the head."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @takes_cache
    def hidden(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | Mask | MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        state: list[State] | None = None,
    ) -> torch.Tensor:
        """Returns the normed hidden states (B, T, dim), input of the head; args as in `forward`."""
        return self._hidden(tokens, positions, mask, score_mod, state)

    def _hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        mask: torch.Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
        state: list[State] | None = None,
    ) -> torch.Tensor:
        op = type(self).__name__
        tokens, sequences = sequences_of(op, "tokens", tokens, state=state, dim=False)
        if tokens.dim() != 2:
            raise ValueError(
                f"{op}: tokens must have shape (B, T), got tokens.shape={tuple(tokens.shape)}"
            )
        past = 0
        if state is not None:
            past = require_states(op, state, len(self.layers), tokens.shape[1])
        if positions is None:
            positions = past + sequences.positions(tokens)
        elif isinstance(positions, torch.Tensor) and positions.shape[-1:] != tokens.shape[-1:]:
            raise ValueError(
                f"{op}: positions must have shape (T,) or (B, T), or (total,) of nested tokens, "
                f"got positions.shape={tuple(positions.shape)}, T={tokens.shape[-1]}"
            )
        rope = None if self.rotary is None else self.rotary(positions)
        x = sequences.restored(self._embedded(tokens, positions))
        shared = {"embeddings": x, "tokens": tokens}
        given: dict[str, Any] = {"rope": rope, "mask": mask, "shared": shared}
        scored = self._scored(score_mod)
        return self._normed(*self._through(self.layers, x, None, given, scored, state))

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the input (B, T, dim) of the first block."""
        x: torch.Tensor = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = self.embed_positions(x, positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        y: torch.Tensor = self.dropout(x)
        return y

    def _through(
        self,
        layers: Iterable[nn.Module],
        x: torch.Tensor,
        residual: torch.Tensor | None,
        given: dict[str, Any],
        scored: dict[str, Any],
        state: list[State] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs blocks, those with scores with the arguments `scored`."""
        recompute = self.config.gradient_checkpointing and state is None and torch.is_grad_enabled()
        for i, layer in enumerate(layers):
            more = given | scored if _takes_score_mod(layer) else given
            if recompute:
                x, residual = checkpoint(layer, x, residual, **more, use_reentrant=False)
            else:
                own = None if state is None else state[i]
                x, residual = layer(x, residual, state=own, **more)
        return x, residual

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Returns the input of the head."""
        if self.collapse is not None:
            x = self.collapse(x)
        y: torch.Tensor = self.norm(x) if residual is None else self.norm(x, residual)[0]
        return y

    def _scored(self, score_mod: ScoreMod | None) -> dict[str, Any]:
        """Returns the keyword arguments for layers that take a score_mod."""
        if score_mod is None:
            return {}
        if not any(map(_takes_score_mod, self.layers)):
            raise ValueError(
                f"{type(self).__name__}: score_mod needs a layer with scores, such as Attention, "
                f"got score_mod={shown(score_mod)}"
            )
        return {"score_mod": score_mod}

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normed hidden states (..., dim) to logits (..., vocab_size)."""
        return head_logits(self, x)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of normed hidden states (B, T, dim), without storing logits."""
        return head_loss(self, x, targets)

    @takes_cache
    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | Mask | MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        state: list[State] | None = None,
    ) -> torch.Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss.

        Args:
            tokens: (B, T) int, or jagged (B, j): sequences of any lengths without padding.
            targets: as tokens, already shifted by one; -100 is ignored.
            positions: (T,) or (B, T) int, or (total,) for a jagged tensor; (axes, B, T) if the
                rotary embedding has several coordinates; default: counted from the start of each
                sequence, or on from the state.
            mask: boolean, True = attend, broadcastable to (B, heads, T, past + T); or a mask of
                `functional.masks`, for recurrences KeyPadding or KeyLengths; or, if all layers
                are attention, a mask_mod of `functional.attention`.
            score_mod: f(score, b, h, q, k) for attention layers, see `functional.attention`.
            state: from `new_state`; the tokens are appended to it. Under torch.no_grad() only.
        """
        x = self._hidden(tokens, positions, mask, score_mod, state)
        if targets is None:
            return self.head(x)
        if self.predictor is not None and self.training:
            self._predictor_loss = self._predict_further(
                x, tokens, targets, positions, mask, score_mod
            )
        return self.loss(x, targets)

    def _predict_further(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        mask: torch.Tensor | Mask | MaskMod | None,
        score_mod: ScoreMod | None,
    ) -> torch.Tensor:
        """Returns the mean over depths d of the loss of token i + d + 1 at position i."""
        assert self.predictor is not None
        if tokens.is_nested:
            raise NotImplementedError(
                f"{type(self).__name__}: tokens must be (B, T) where further tokens are predicted, "
                "got a nested tensor"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)

        def run(block: nn.Module, y: torch.Tensor) -> torch.Tensor:
            length = y.shape[1]
            rope = None if self.rotary is None else self.rotary(positions[..., :length])
            seen = mask[..., :length, :length] if isinstance(mask, torch.Tensor) else mask
            scored = {"score_mod": score_mod} if _takes_score_mod(block) else {}
            out, residual = block(y, rope=rope, mask=seen, **scored)
            return (out + residual).to(y.dtype)

        states = self.predictor(x, tokens, self.embed_tokens, lambda y: y, run)
        losses = [self.loss(state, targets[:, d:]) for d, state in enumerate(states, 1)]
        return torch.stack(losses).mean()
