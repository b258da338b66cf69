"""DeBERTa: encoders with disentangled attention to contents and relative positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from omniattn.checks.arguments import shown
from omniattn.functional.masks import Mask
from omniattn.models.encoders.bert import HF_HEAD, Bert, MaskedConfig
from omniattn.models.encoders.text_encoder import HF_FIXED, HF_OPTIONS, TextEncoder, hf_weights
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.models.model import Embedding
from omniattn.modules import DisentangledAttention, LayerNorm, LearnedPositional
from omniattn.modules.base.fields import Epsilon, Size, SizeOrZero

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
}
_OPTIONS = HF_OPTIONS | {"adds_positions": "position_biased_input", "legacy": "legacy"}
_FIXED = HF_FIXED | {"relative_attention": True, "tie_word_embeddings": True}
_BODY: Renames = (
    *hf_weights("deberta"),
    (r"^relative_norm", "deberta.encoder.LayerNorm"),
    (r"^relative", "deberta.encoder.rel_embeddings"),
    (r"^conv\.norm", "deberta.encoder.conv.LayerNorm"),
    (r"^conv\.", "deberta.encoder.conv.conv."),
)


def _head(ours: DisentangledConfig) -> Renames:
    """Returns the names of the head's weights."""
    if ours.legacy:
        return HF_HEAD
    return (
        (r"^head_transform", "lm_predictions.lm_head.dense"),
        (r"^head_norm", "lm_predictions.lm_head.LayerNorm"),
        (r"^head_bias", "lm_predictions.lm_head.bias"),
    )


def _to_hf(ours: DisentangledConfig) -> dict[str, Any]:
    if ours.mask_decoder:
        raise NotImplementedError(
            f"{type(ours).__name__}: mask_decoder must be False in transformers, "
            "got mask_decoder=True"
        )
    return {"max_relative_positions": ours.max_distance, "pos_att_type": ["c2p", "p2c"]}


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    name = "DebertaV2Config" if theirs.model_type == "deberta-v2" else "DebertaConfig"
    if set(theirs.pos_att_type or ()) != {"c2p", "p2c"}:
        raise NotImplementedError(
            f"{name}: pos_att_type must be ['c2p', 'p2c'], "
            f"got pos_att_type={shown(theirs.pos_att_type)}"
        )
    for option, plain in (("talking_head", False), ("conv_groups", 1)):
        if (value := getattr(theirs, option, plain)) != plain:
            raise NotImplementedError(f"{name}: {option} must be {plain}, got {option}={value}")
    distance = theirs.max_relative_positions
    return {"max_distance": theirs.max_position_embeddings if distance < 1 else distance}


_COMMON = Conversion(_to_hf, _from_hf)


@dataclass(frozen=True)
class DisentangledConfig(MaskedConfig):
    """Sizes and options shared by both versions of DeBERTa.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, max_positions, dropout_p: as in
            BertConfig.
        token_types: number of token types, 0 for none.
        max_distance: bound of the embedded distances.
        adds_positions: True to add absolute positions to the embeddings.
        mask_decoder: True for the enhanced mask decoder: absolute positions enter before the head.
        legacy: names of the head's weights in transformers, without effect here. True:
            `cls.predictions`, its default; False: `lm_predictions`, the names in the releases.
    """

    norm_eps: Epsilon = 1e-7
    token_types: SizeOrZero = 0
    max_distance: Size = 512
    adds_positions: bool = False
    mask_decoder: bool = False
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_decoder and self.adds_positions:
            raise ValueError(
                f"{type(self).__name__}: mask_decoder must be False with adds_positions=True"
            )

    @abstractmethod
    def mixer(self, layer: int) -> DisentangledAttention.Config:
        """Returns the config of a layer's attention."""

    @property
    def longest(self) -> int | None:  # type: ignore[override]
        return self.max_positions if self.mask_decoder or self.adds_positions else None

    @property
    def relative_norm(self) -> bool:
        """True if the embeddings of distances have a norm."""
        return False

    @property
    def convolution(self) -> int:
        """Width of the convolution in parallel with the first layer, 0 for none."""
        return 0

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Deberta:
        return Deberta(self, device=device, dtype=dtype)

    def build_body(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DebertaEncoder:
        return DebertaEncoder(self, device=device, dtype=dtype)


@dataclass(frozen=True)
class DebertaConfig(DisentangledConfig):
    """Config of a :class:`Deberta` of the first version.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, max_positions, dropout_p: as in
            BertConfig.
        token_types: number of token types, 0 for none.
        max_distance: bound of the embedded distances.
        adds_positions: True to add absolute positions to the embeddings.
        mask_decoder: True for the enhanced mask decoder: absolute positions enter before the head.
        legacy: names of the head's weights in transformers, without effect here. True:
            `cls.predictions`, its default; False: `lm_predictions`, the names in the releases.

    Reference:
        He et al., "DeBERTa", 2020, arXiv 2006.03654.
    """

    architecture = "deberta"
    hf = Counterpart(
        "DebertaForMaskedLM",
        _OPTIONS,
        (
            *_BODY,
            (r"self\.(query|key|value)_proj\.weight", "self.in_proj.weight"),
            (r"self\.query_proj\.bias", "self.q_bias"),
            (r"self\.value_proj\.bias", "self.v_bias"),
            (r"self\.pos_key_proj", "self.pos_proj"),
            (r"self\.pos_query_proj", "self.pos_q_proj"),
        ),
        fixed=_FIXED,
        conversions=(_COMMON,),
        interleaved={r"in_proj": lambda c: c.num_heads},
        layer_weights=_head,
    )

    def mixer(self, layer: int) -> DisentangledAttention.Config:
        return DisentangledAttention.Config(
            self.dim,
            self.num_heads,
            self.max_distance,
            share_projections=False,
            clamp_distance=False,
            dropout_p=self.dropout_p,
            key_bias=False,
            out_proj=True,
            **self.common,
        )


def _second_to_hf(ours: DebertaV2Config) -> dict[str, Any]:
    return {
        "position_buckets": ours.buckets or -1,
        "norm_rel_ebd": "layer_norm" if ours.relative_norm else "none",
        "share_att_key": ours.share_projections,
        "conv_kernel_size": ours.convolution,
        "conv_act": ours.conv_activation,
    }


def _second_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    norm = getattr(theirs, "norm_rel_ebd", "none")
    return {
        "buckets": max(0, getattr(theirs, "position_buckets", -1)),
        "relative_norm": "layer_norm" in [part.strip() for part in norm.lower().split("|")],
        "share_projections": getattr(theirs, "share_att_key", False),
        "convolution": getattr(theirs, "conv_kernel_size", 0),
        "conv_activation": getattr(theirs, "conv_act", "tanh"),
    }


@dataclass(frozen=True)
class DebertaV2Config(DisentangledConfig):
    """Config of a :class:`Deberta` of version 2 or 3.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, max_positions, dropout_p: as in
            BertConfig.
        token_types: number of token types, 0 for none.
        max_distance: bound of the embedded distances.
        adds_positions: True to add absolute positions to the embeddings.
        mask_decoder: True for the enhanced mask decoder: absolute positions enter before the head.
        legacy: names of the head's weights in transformers, without effect here. True:
            `cls.predictions`, its default; False: `lm_predictions`, the names in the releases.
        buckets: number of log buckets of distances, 0 for none.
        relative_norm: True for a norm of the embeddings of distances.
        share_projections: True if positions use the projections of contents.
        convolution: width of a convolution of the embeddings that is added to the first layer's
            output (XLarge and larger), odd; 0 for none.
        conv_activation: activation of the convolution, "gelu" or "tanh".

    Reference:
        He et al., "DeBERTaV3", 2021, arXiv 2111.09543.
    """

    architecture = "deberta-v2"
    hf = Counterpart(
        "DebertaV2ForMaskedLM",
        _OPTIONS,
        _BODY,
        fixed=_FIXED,
        conversions=(_COMMON, Conversion(_second_to_hf, _second_from_hf)),
        layer_weights=_head,
    )

    buckets: SizeOrZero = 256
    relative_norm: bool = True
    share_projections: bool = True
    convolution: SizeOrZero = 0
    conv_activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution and self.convolution % 2 == 0:
            raise ValueError(
                f"DebertaV2Config: convolution must be odd or 0, got convolution={self.convolution}"
            )
        if self.conv_activation not in _ACTIVATIONS:
            raise ValueError(
                f"DebertaV2Config: conv_activation must be one of {', '.join(_ACTIVATIONS)}, "
                f"got conv_activation={shown(self.conv_activation)}"
            )

    def mixer(self, layer: int) -> DisentangledAttention.Config:
        return DisentangledAttention.Config(
            self.dim,
            self.num_heads,
            self.max_distance,
            self.buckets,
            share_projections=self.share_projections,
            clamp_distance=False,
            dropout_p=self.dropout_p,
            out_proj=True,
            **self.common,
        )


class _Convolution(nn.Conv1d):
    """Computes LN(y + act(conv(x))), with x the embeddings and y the first layer's output."""

    def __init__(
        self,
        config: DebertaV2Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.init_std = config.init_std  # before the constructor, which uses it
        width = config.convolution
        sizes = config.dim, config.dim, width
        super().__init__(*sizes, padding=width // 2, device=device, dtype=dtype)
        self.activation = _ACTIVATIONS[config.conv_activation]
        self.norm = LayerNorm(config.layer_norm(config.dim), device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, init_std^2) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=self.init_std)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def added(self, x: Tensor, y: Tensor, dropout: nn.Module) -> Tensor:
        """Returns LN(y + act(dropout(conv(x)))) for x, y (B, T, dim)."""
        out = self(x.transpose(1, 2)).transpose(1, 2)
        normed: Tensor = self.norm(y + self.activation(dropout(out)))
        return normed


class DebertaEncoder(TextEncoder):
    """Post-norm blocks with disentangled attention; distances have embeddings.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.
    """

    config: DisentangledConfig

    def __init__(
        self,
        config: DisentangledConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        rows = 2 * c.mixer(0).span
        self.relative = Embedding(rows, c.dim, c.init_std, device=device, dtype=dtype)
        self.relative_norm: LayerNorm | None = None
        if c.relative_norm:
            self.relative_norm = LayerNorm(c.layer_norm(c.dim), device=device, dtype=dtype)
        self.conv: _Convolution | None = None
        if isinstance(c, DebertaV2Config) and c.convolution:
            self.conv = _Convolution(c, device=device, dtype=dtype)

    def _layer(self, index: int, x: Tensor, seen: dict[str, Any]) -> Tensor:
        """Maps x (B, T, dim) through a layer; `seen`: mask and context of its attention."""
        rows = self.relative.weight
        if self.relative_norm is not None:
            rows = self.relative_norm(rows)
        y = self.attentions[index](x, positions=self.dropout(rows), **seen)
        out: Tensor = self.mlps[index](y)
        return out

    def _first_layers(
        self, count: int, x: Tensor, key_padding: Tensor | None, seen: dict[str, Any]
    ) -> Tensor:
        """Maps embeddings (B, T, dim) through the first layers."""
        if key_padding is not None and self.conv is not None:
            x = x * key_padding[..., None]  # the convolution would mix padding in
        embedded = x
        for index in range(count):
            x = self._layer(index, x, seen)
            if index == 0 and self.conv is not None:
                x = self.conv.added(embedded, x, self.dropout)
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
        seen = options | self._seen(x, mask, key_padding)
        return self._first_layers(len(self.mlps), x, key_padding, seen)


class Deberta(DebertaEncoder, Bert):
    """A masked language model with disentangled attention to contents and relative positions.

    With `mask_decoder` the head reads the last layer's result for queries h + P, applied twice,
    where h are the states before this layer and P the absolute positions.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        tokens (B, T) int -> logits (B, T, vocab_size), or the mean loss with `targets` (B, T).

    Reference:
        He et al., "DeBERTa", 2020, arXiv 2006.03654.

    Example:
        >>> model = Deberta(DebertaV2Config(dim=48, num_layers=1))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 257])
    """

    config: DisentangledConfig

    def __init__(
        self,
        config: DisentangledConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        c = config
        self.mask_positions: LearnedPositional | None = None
        if c.mask_decoder:
            positions = LearnedPositional.Config(c.max_positions, c.dim, c.init_std)
            self.mask_positions = LearnedPositional(positions, device=device, dtype=dtype)

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
        if self.mask_positions is None:
            options |= {"token_types": token_types, "mask": mask, "key_padding": key_padding}
            return self.hidden(tokens, **options)
        x = self.embed(tokens, token_types)
        seen = options | self._seen(x, mask, key_padding)
        last = len(self.mlps) - 1
        context = self._first_layers(last, x, key_padding, seen)
        query = self.mask_positions(context)
        for _ in range(2):
            query = self._layer(last, query, seen | {"context": context})
        return query
