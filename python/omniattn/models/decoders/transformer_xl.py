"""Transformer-XL: a decoder that reads the layers' inputs of earlier segments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn.checks.arguments import require_choice, shown
from omniattn.models._states import require_states
from omniattn.models.head import head_logits, head_loss
from omniattn.models.model import Embedding, Model, ModelConfig, require_token_ids
from omniattn.modules import MLP, Dropout, LayerNorm, Residual, State, TransformerXLAttention
from omniattn.modules.base.fields import Epsilon, Probability, SignedInt, Size
from omniattn.modules.base.state import Stateful, Storage, takes_cache

if TYPE_CHECKING:
    from typing_extensions import Self

_BIASES = ("r_w_bias", "r_r_bias")


@dataclass(frozen=True)
class TransformerXLConfig(ModelConfig):
    """Sizes and options of a Transformer-XL.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim: sizes.
        head_dim: size of a head, default dim / num_heads.
        memory_length: number of earlier tokens that `segment` keeps.
        same_length: True to limit every query to memory_length tokens.
        clamp_length: largest distance, to which larger ones are clamped; -1 for none.
        share_biases: True if all layers share the biases u and v of the queries.
        placement: "post" or "pre" for norms after or before the layers; there is no final norm.
        cutoffs: increasing first ids of the tails of an adaptive softmax, which has weights of its
            own, `torch.nn.AdaptiveLogSoftmaxWithLoss`; () for a softmax with the embedding's weight
            and a bias.
        div_value: factor by which each tail is narrower than the one before.
        dropout_p, attention_dropout_p: dropout of embeddings, hidden layers and each layer's
            output; of attention weights.
        norm_eps, init_std: epsilon of the norms; standard deviation of all initial weights.

    Reference:
        Dai et al., "Transformer-XL", 2019, arXiv 1901.02860; adaptive softmax: Grave et al., 2016,
        arXiv 1609.04309.
    """

    architecture = "transformer-xl"

    vocab_size: Size = 256
    dim: Size = 192
    num_layers: Size = 4
    num_heads: Size = 6
    hidden_dim: Size = 768
    head_dim: Size | None = None
    memory_length: Size = 128
    same_length: bool = False
    clamp_length: SignedInt = -1
    share_biases: bool = True
    placement: str = "post"
    cutoffs: tuple[Size, ...] = ()
    div_value: float = 4.0
    dropout_p: Probability = 0.0
    attention_dropout_p: Probability = 0.0
    norm_eps: Epsilon = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("TransformerXLConfig", "placement", self.placement, ("pre", "post"))
        edges = (0, *self.cutoffs, self.vocab_size)
        if any(left >= right for left, right in itertools.pairwise(edges)):
            raise ValueError(
                "TransformerXLConfig: cutoffs must increase and be below vocab_size, "
                f"got cutoffs={shown(self.cutoffs)}, vocab_size={self.vocab_size}"
            )

    @property
    def attention(self) -> TransformerXLAttention.Config:
        """Config of a layer's attention."""
        return TransformerXLAttention.Config(
            self.dim,
            self.num_heads,
            self.head_dim,
            self.memory_length,
            self.same_length,
            self.clamp_length,
            self.attention_dropout_p,
            self.init_std,
            self.backend,
        )

    @property
    def mlp(self) -> MLP.Config:
        """Config of a layer's feed-forward layer."""
        return MLP.Config(
            self.dim,
            self.hidden_dim,
            "relu",
            init_std=self.init_std,
            out_init_std=self.init_std,
            backend=self.backend,
            dropout_p=self.dropout_p,
        )

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TransformerXL:
        return TransformerXL(self, device=device, dtype=dtype)


class TransformerXL(Model, Stateful):
    """Decoder with relative positions whose layers also read their inputs of earlier segments.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, T, vocab_size), with cutoffs log probabilities; or the mean
        loss with `targets` (B, T).

    Example:
        >>> model = TransformerXL(TransformerXLConfig(dim=48, num_layers=1))
        >>> memory, text = None, torch.zeros(1, 6, dtype=torch.long)
        >>> for tokens in text.split(3, 1):
        ...     logits, memory = model.segment(tokens, memory)
        >>> logits.shape, memory[0].shape
        (torch.Size([1, 3, 256]), torch.Size([1, 6, 48]))
    """

    config: TransformerXLConfig

    def __init__(
        self,
        config: TransformerXLConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        scale = math.sqrt(c.dim)
        self.embed_tokens = Embedding(c.vocab_size, c.dim, c.init_std, scale=scale, **factory)
        self.dropout = Dropout(c.dropout_p)
        norm = LayerNorm.Config(c.dim, c.norm_eps, backend=c.backend)
        placed = Residual.Config(norm, c.placement, c.dropout_p)
        self.attentions, self.mlps = nn.ModuleList(), nn.ModuleList()
        biases: tuple[nn.Parameter, nn.Parameter] | None = None
        for _ in range(c.num_layers):
            attention = TransformerXLAttention(c.attention, biases=biases, **factory)
            if c.share_biases:
                biases = attention.r_w_bias, attention.r_r_bias
            self.attentions.append(Residual(attention, placed, **factory))
            self.mlps.append(Residual(MLP(c.mlp, **factory), placed, **factory))
        self.lm_head: nn.Module | None = None
        self.adaptive: nn.AdaptiveLogSoftmaxWithLoss | None = None
        self.head_bias: nn.Parameter | None = None
        if c.cutoffs:
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
                *(c.dim, c.vocab_size, list(c.cutoffs), c.div_value), head_bias=True, **factory
            )
        else:
            self.head_bias = nn.Parameter(torch.empty(c.vocab_size, **factory))
        self.register_state_dict_post_hook(_once)
        self.register_load_state_dict_pre_hook(_for_each_layer)
        self.register_load_state_dict_post_hook(_shared_again)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias of the logits to 0."""
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    def share_biases(self) -> None:
        """Gives the biases of the first layer to all layers, if the config says so.

        Loading and conversions may have replaced them by copies.
        """
        first, *others = (cast(Any, attention).layer for attention in self.attentions)
        for layer in others if self.config.share_biases else ():
            layer.r_w_bias, layer.r_r_bias = first.r_w_bias, first.r_r_bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.share_biases()
        return self

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> list[State]:
        """Returns empty states of all layers, which keep all earlier tokens."""
        layers = [cast(Residual, residual).layer for residual in self.attentions]
        return [
            cast(TransformerXLAttention, layer).new_state(batch, max_length, **storage)
            for layer in layers
        ]

    @takes_cache
    def hidden(
        self,
        tokens: Tensor,
        memory: list[Tensor] | None = None,
        *,
        state: list[State] | None = None,
    ) -> Tensor:
        """Returns the hidden states (B, T, dim), input of the head; args as in `forward`."""
        return self._states(tokens, memory, state)[0]

    def _states(
        self, tokens: Tensor, memory: list[Tensor] | None, state: list[State] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns hidden states (B, T, dim), and the inputs of all layers with their memory."""
        layers = self.config.num_layers
        require_token_ids("TransformerXL", "tokens", tokens)
        if memory is not None and (
            not isinstance(memory, list | tuple) or len(memory) != layers or state is not None
        ):
            raise ValueError(
                "TransformerXL: memory must be the list of `segment`, with an entry for each of "
                f"{layers} layers, and None with a state, got memory={shown(memory)}"
            )
        if state is not None:
            require_states("TransformerXL", state, layers, tokens.shape[1])
        x: Tensor = self.dropout(self.embed_tokens(tokens))
        memories = []
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            earlier = None if memory is None else memory[i]
            memories.append(cast(Any, attention).layer.next_memory(x, earlier))
            if earlier is not None and self.config.placement == "pre":
                earlier = cast(Any, attention).norm(earlier)
            own = None if state is None else state[i]
            x = mlp(attention(x, earlier, state=own))
        return self.dropout(x), memories

    @property
    def head_weight(self) -> Tensor:
        """Weight (vocab_size, dim) of the softmax without cutoffs."""
        return self.embed_tokens.weight

    def head(self, x: Tensor) -> Tensor:
        """Maps hidden states (..., dim) to logits, or with cutoffs log probabilities (..., V)."""
        if self.adaptive is None:
            return head_logits(self, x, self.head_bias)
        return self.adaptive.log_prob(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.adaptive is None:
            return head_loss(self, x, targets, self.head_bias)
        kept = targets != -100
        if not bool(kept.any()):
            return x.sum() * 0.0
        loss: Tensor = self.adaptive(x[kept], targets[kept]).loss
        return loss

    def segment(
        self, tokens: Tensor, memory: list[Tensor] | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Computes `forward` for a segment, and the memory for the next one.

        Args:
            tokens, targets: as in `forward`.
            memory: result for the segment before, None for the first one.

        Returns:
            Logits, or the loss with targets; and for each layer its inputs (B, M, dim) of the last
            memory_length tokens, without gradients.
        """
        x, memories = self._states(tokens, memory, None)
        return (self.head(x) if targets is None else self._loss(x, targets)), memories

    @takes_cache
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        memory: list[Tensor] | None = None,
        state: list[State] | None = None,
    ) -> Tensor:
        """Returns logits (B, T, vocab_size), or with targets the mean loss.

        Args:
            tokens: (B, T) int.
            targets: (B, T), next token of each position; -100 is ignored.
            memory: from `segment`, of the tokens before.
            state: from `new_state`; the tokens are appended to it. Under torch.no_grad() only.
        """
        x, _ = self._states(tokens, memory, state)
        return self.head(x) if targets is None else self._loss(x, targets)


def _copies(model: Any, prefix: str) -> list[tuple[str, str]]:
    """Returns the names of shared biases in later layers, each with that in the first layer."""
    layers = range(1, model.config.num_layers) if model.config.share_biases else ()
    return [
        (f"{prefix}attentions.{i}.layer.{name}", f"{prefix}attentions.0.layer.{name}")
        for i in layers
        for name in _BIASES
    ]


def _once(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leaves shared biases only in the first layer, as files cannot share tensors."""
    for copy, _first in _copies(model, prefix):
        del state_dict[copy]


def _shared_again(model: Any, _: Any) -> None:
    model.share_biases()


def _for_each_layer(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for copy, first in _copies(model, prefix):
        if first in state_dict:
            state_dict[copy] = state_dict[first]
