"""Falcon: attention and feed-forward layer side by side, few key heads, or ALiBi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import require_choice
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.decoders.family import rope_from_hf, rope_to_hf
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm, RotaryEmbedding
from omniattn.modules.base.fields import Epsilon, Positive, Size
from omniattn.reference import RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _layout_to_hf(ours: FalconConfig) -> dict[str, Any]:
    grouped = 1 < ours.num_kv_heads < ours.num_heads
    if grouped and ours.placement == "pre":
        raise NotImplementedError(
            "FalconConfig: transformers has grouped queries only beside a parallel MLP; "
            f"num_kv_heads must be 1 or num_heads, got num_kv_heads={ours.num_kv_heads}"
        )
    norms = {"parallel": 1, "parallel_norms": 2}.get(ours.placement)
    new = grouped or norms == 2
    return rope_to_hf(ours) | {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": norms if new else None,
        "parallel_attn": norms is not None,
        "multi_query": ours.num_kv_heads == 1,
        "num_kv_heads": ours.num_kv_heads,
    }


def _layout_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    new, norms = theirs.new_decoder_architecture, theirs.num_ln_in_parallel_attn
    if new and not theirs.parallel_attn:
        raise NotImplementedError(
            "FalconConfig: parallel_attn must be True with new_decoder_architecture, "
            "got parallel_attn=False"
        )
    if norms not in ((None, 1, 2) if new else (None, 1)):
        raise NotImplementedError(
            "FalconConfig: num_ln_in_parallel_attn must be 1, or 2 with new_decoder_architecture, "
            f"got num_ln_in_parallel_attn={norms}"
        )
    placement = "parallel" if theirs.parallel_attn else "pre"
    kv_heads = 1 if theirs.multi_query else theirs.num_attention_heads
    if new:
        kv_heads = theirs.num_kv_heads
        placement = "parallel" if norms == 1 else "parallel_norms"
    return rope_from_hf(theirs) | {"num_kv_heads": kv_heads, "placement": placement}


def _norms(c: FalconConfig) -> Renames:
    if c.placement != "parallel_norms":
        return ()
    return ((r"input_layernorm", "ln_attn"), (r"post_attention_layernorm", "ln_mlp"))


@dataclass(frozen=True)
class FalconConfig(Decoder.Config):
    """Config of a Falcon.

    Args:
        num_heads, num_kv_heads: number of query heads, a divisor of dim, and of key heads.
        hidden_dim: hidden size of the feed-forward layers.
        placement: as in DecoderBlock: "parallel" for Falcon-7B and Falcon 2, "parallel_norms" for
            Falcon-40B and 180B, "pre" for Falcon-RW.
        alibi: True for ALiBi instead of rotary positions; its slopes are divided by the square
            root of the head size, as the scores are.
        bias: True for biases of all linear layers.
        max_positions: longest sequence that the model was made for; allocates nothing.
        norm_eps: epsilon of the norms.
        rope_base, rope_scaling: base and scaling of the rotary embedding.

    Reference:
        Almazrouei et al., "The Falcon Series of Open Language Models", 2023, arXiv 2311.16867.
    """

    architecture = "falcon"
    hf = Counterpart(
        "FalconForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "hidden_dim": "ffn_hidden_size",
            "alibi": "alibi",
            "bias": "bias",
            "max_positions": "max_position_embeddings",
            "norm_eps": "layer_norm_epsilon",
            "init_std": "initializer_range",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^embed_tokens", "transformer.word_embeddings"),
            (r"^norm", "transformer.ln_f"),
            (r"^layers", "transformer.h"),
            (r"mixer\.[qkv]_proj", "self_attention.query_key_value"),
            (r"mixer\.o_proj", "self_attention.dense"),
            (r"up_proj", "dense_h_to_4h"),
            (r"down_proj", "dense_4h_to_h"),
        ),
        fixed={"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu"},
        conversions=(Conversion(_layout_to_hf, _layout_from_hf),),
        interleaved={r"query_key_value": lambda c: c.num_kv_heads},
        layer_weights=_norms,
    )

    tie_embeddings: bool = True
    num_heads: Size = 6
    num_kv_heads: Size = 1
    hidden_dim: Size = 768
    placement: str = "parallel"
    alibi: bool = False
    bias: bool = False
    max_positions: Size = 2048
    norm_eps: Epsilon = 1e-5
    rope_base: Positive = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("pre", "parallel", "parallel_norms")
        require_choice("FalconConfig", "placement", self.placement, known)

    @property
    def norm(self) -> LayerNorm.Config:
        return LayerNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def rope(self) -> RotaryEmbedding.Config | None:
        if self.alibi:
            return None
        size = self.dim // self.num_heads
        return RotaryEmbedding.Config(size, self.rope_base, self.rope_scaling)

    def block(self, layer: int) -> DecoderBlock.Config:
        positions: dict[str, Any] = {}
        if self.alibi:
            positions = {"alibi": 8.0, "alibi_scale": (self.dim / self.num_heads) ** -0.5}
        attention = Attention.Config(
            self.dim,
            self.num_heads,
            self.num_kv_heads,
            bias=self.bias,
            out_bias=self.bias,
            **positions,
            **self.common,
        )
        mlp = MLP.Config(self.dim, self.hidden_dim, "gelu", self.bias, **self.common)
        return DecoderBlock.Config(
            attention,
            mlp,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
            placement=self.placement,
        )
