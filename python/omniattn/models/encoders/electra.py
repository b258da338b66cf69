"""ELECTRA: a generator restores masked tokens, a discriminator finds those it got wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_integers
from omniattn.functional.masks import Mask
from omniattn.models.encoders.bert import MaskedConfig
from omniattn.models.encoders.text_encoder import (
    HF_FIXED,
    HF_OPTIONS,
    TextEncoder,
    TextEncoderConfig,
    hf_weights,
)
from omniattn.models.hf import Counterpart
from omniattn.models.model import Model, ModelConfig, require_token_ids
from omniattn.modules import Linear
from omniattn.modules.base.fields import Positive, Size

_OPTIONS = HF_OPTIONS | {"embedding_dim": "embedding_size"}
_FIXED = HF_FIXED | {"is_decoder": False}
#: Modules of the discriminator that the generator shares.
_SHARED = ("embed_tokens", "embed_types", "embed_positions", "embed_norm")


@dataclass(frozen=True)
class ElectraGeneratorConfig(MaskedConfig):
    """Config of ELECTRA's generator, a :class:`Bert` with embeddings of their own width.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, max_positions, token_types, dropout_p:
            as in BertConfig.
        embedding_dim: width of the embeddings.
    """

    architecture = "electra-generator"
    hf = Counterpart(
        "ElectraForMaskedLM",
        _OPTIONS,
        (
            *hf_weights("electra"),
            (r"^head_transform", "generator_predictions.dense"),
            (r"^head_norm", "generator_predictions.LayerNorm"),
            (r"^head_bias", "generator_lm_head.bias"),
        ),
        fixed=_FIXED | {"tie_word_embeddings": True},
    )

    embedding_dim: Size = 192


@dataclass(frozen=True)
class ElectraDiscriminatorConfig(TextEncoderConfig):
    """Config of ELECTRA's discriminator, a :class:`ReplacedTokenDetector`.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, max_positions, token_types, dropout_p:
            as in BertConfig.
        embedding_dim: width of the embeddings.
    """

    architecture = "electra-discriminator"
    hf = Counterpart(
        "ElectraForPreTraining",
        _OPTIONS,
        (
            *hf_weights("electra"),
            (r"^head_transform", "discriminator_predictions.dense"),
            (r"^head", "discriminator_predictions.dense_prediction"),
        ),
        fixed=_FIXED,
    )

    embedding_dim: Size = 192

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ReplacedTokenDetector:
        return ReplacedTokenDetector(self, device=device, dtype=dtype)


class ReplacedTokenDetector(TextEncoder):
    """Tells which tokens were replaced: logits = gelu(x W) w + b, with the encoder's states x.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, T), or the mean loss with `replaced` (B, T).

    Reference:
        Clark et al., "ELECTRA", 2020, arXiv 2003.10555.

    Example:
        >>> model = ReplacedTokenDetector(ElectraDiscriminatorConfig(num_layers=1))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5])
    """

    config: ElectraDiscriminatorConfig

    def __init__(
        self,
        config: ElectraDiscriminatorConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        self.head_transform = Linear(c.linear(c.dim, c.dim), device=device, dtype=dtype)
        self.head = Linear(c.linear(c.dim, 1), device=device, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        replaced: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T), above 0 for replaced tokens, or the mean binary cross-entropy.

        Args:
            tokens: (B, T) int.
            replaced: (B, T) int, 1 for replaced tokens and 0 for others; -100 is ignored.
            token_types: (B, T) int, default 0.
            mask: as in Attention.
            key_padding: (B, T) bool, True = real; no token sees the others.
        """
        x = self.hidden(tokens, token_types=token_types, mask=mask, key_padding=key_padding)
        logits: Tensor = self.head(nn.functional.gelu(self.head_transform(x))).squeeze(-1)
        if replaced is None:
            return logits
        op = type(self).__name__
        require_integers(op, "replaced", replaced)
        if replaced.shape != tokens.shape:
            raise ValueError(
                f"{op}: replaced must have the shape of tokens, got "
                f"replaced.shape={tuple(replaced.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        return _binary_loss(logits, replaced)


def _binary_loss(logits: Tensor, replaced: Tensor) -> Tensor:
    """Returns the mean binary cross-entropy of the entries that are not -100."""
    known = replaced != -100
    scores = logits.double() if logits.dtype == torch.float64 else logits.float()
    losses = nn.functional.binary_cross_entropy_with_logits(
        scores, (replaced == 1).to(scores.dtype), reduction="none"
    )
    return (losses * known).sum() / known.sum().clamp(min=1)


@dataclass(frozen=True)
class ElectraConfig(ModelConfig):
    """Config of :class:`Electra`: both models, and the weight of the discriminator's loss.

    Args:
        generator, discriminator: configs with the same vocabulary and width of embeddings.
        weight: factor of the discriminator's loss.

    Reference:
        Clark et al., "ELECTRA", 2020, arXiv 2003.10555.
    """

    architecture = "electra"

    generator: ElectraGeneratorConfig = field(
        default_factory=lambda: ElectraGeneratorConfig(dim=96, num_heads=3, hidden_dim=384)
    )
    discriminator: ElectraDiscriminatorConfig = field(default_factory=ElectraDiscriminatorConfig)
    weight: Positive = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "embedding_dim", "max_positions", "token_types", "norm_eps"):
            own, other = getattr(self.generator, name), getattr(self.discriminator, name)
            if own != other:
                raise ValueError(
                    f"ElectraConfig: {name} of generator and discriminator must be equal, "
                    f"got {own} and {other}"
                )

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.discriminator.vocab_size

    @property
    def longest(self) -> int:
        return self.discriminator.longest

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Electra:
        return Electra(self, device=device, dtype=dtype)


class Electra(Model):
    """Trains a discriminator on the tokens that a small generator proposes for masked ones.

    The loss is that of the generator on masked tokens plus `weight` times that of the discriminator
    on all tokens. Proposals are drawn from the generator's distribution and carry no gradient. Both
    models share the embeddings, which `discriminator` holds.

    Args:
        config: both models' configs.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> the discriminator's logits (B, T), or the loss with `targets` (B, T).

    Reference:
        Clark et al., "ELECTRA", 2020, arXiv 2003.10555.

    Example:
        >>> model = Electra(ElectraConfig())
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5])
    """

    config: ElectraConfig

    def __init__(
        self,
        config: ElectraConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        first, second = config.generator, config.discriminator
        self.generator = replace(first, backend=config.backend or first.backend).build(
            device=device, dtype=dtype
        )
        self.discriminator = replace(second, backend=config.backend or second.backend).build(
            device=device, dtype=dtype
        )
        for name in _SHARED:  # stored once, so that checkpoints hold no tensor twice
            delattr(self.generator, name)
            self.generator.__dict__[name] = getattr(self.discriminator, name)
        self._losses: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Drops the last forward's losses: tensors of a graph can be neither copied nor pickled.
        return self.__dict__ | {"_losses": {}}

    def further_losses(self) -> dict[str, float]:
        return {name: loss.item() for name, loss in self._losses.items()}

    def propose(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens with proposals for the masked ones, and what the generator got wrong.

        Arguments are those of `forward`. Proposals are the same in each call in evaluation.

        Returns:
            tokens (B, T); replaced (B, T), 1 where a proposal is not the target and -100 for
            padding; mean loss of the generator.
        """
        op = type(self).__name__
        require_token_ids(op, "targets", targets)
        given: dict[str, Any] = {"token_types": token_types, "mask": mask}
        given["key_padding"] = key_padding
        states = self.generator.hidden(tokens, **given)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"{op}: targets must have the shape of tokens, got "
                f"targets.shape={tuple(targets.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        chosen = targets != -100
        logits = self.generator.head(states[chosen])
        loss = functional.cross_entropy(logits, targets[chosen], backend=self.config.backend)
        with torch.no_grad():
            seed = None if self.training else torch.zeros(2, dtype=torch.int64)
            noise = functional.uniform_like(logits, seed=seed, backend=self.config.backend)
            drawn = (logits.float() - (-noise.log()).log()).argmax(-1)  # Gumbel's
            proposed = tokens.masked_scatter(chosen, drawn.to(tokens.dtype))
            replaced = (proposed != torch.where(chosen, targets, tokens)).long()
            if key_padding is not None:
                replaced = replaced.masked_fill(~key_padding, -100)
        return proposed, replaced, loss

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        key_padding: Tensor | None = None,
    ) -> Tensor:
        """Returns the discriminator's logits (B, T), or with targets the loss of both models.

        Args:
            tokens: (B, T) int.
            targets: (B, T) int, the tokens that the generator has to restore, -100 for others.
            token_types: (B, T) int, default 0.
            mask: as in Attention.
            key_padding: (B, T) bool, True = real; no token sees the others.
        """
        given: dict[str, Any] = {"token_types": token_types, "mask": mask}
        given["key_padding"] = key_padding
        if targets is None:
            logits: Tensor = self.discriminator(tokens, **given)
            return logits
        proposed, replaced, loss = self.propose(tokens, targets, **given)
        detection: Tensor = self.discriminator(proposed, replaced, **given)
        self._losses = {"generator": loss.detach(), "discriminator": detection.detach()}
        return loss + self.config.weight * detection
