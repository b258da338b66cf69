"""GPT-2: learned positions, pre-norm with LayerNorm, GELU, biases, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Counterpart
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm, LearnedPositional
from omniattn.modules.base.fields import Epsilon, Size


@dataclass(frozen=True)
class GPT2Config(Decoder.Config):
    """Sizes and options of a GPT-2.

    Args:
        num_heads: number of heads, a divisor of dim. The feed-forward layers are 4 dim wide.
        max_positions: number of learned positions.
        norm_eps: epsilon of the norms.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    architecture = "gpt2"
    hf = Counterpart(
        "GPT2LMHeadModel",
        {
            "vocab_size": "vocab_size",
            "dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "dropout_p": "resid_pdrop",
            "init_std": "initializer_range",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^embed_tokens", "transformer.wte"),
            (r"^embed_positions", "transformer.wpe"),
            (r"^norm", "transformer.ln_f"),
            (r"^layers", "transformer.h"),
            (r"input_layernorm", "ln_1"),
            (r"post_attention_layernorm", "ln_2"),
            (r"mixer\.[qkv]_proj", "attn.c_attn"),
            (r"mixer\.o_proj", "attn.c_proj"),
            (r"up_proj", "c_fc"),
            (r"down_proj", "c_proj"),
        ),
        transposed=r"\.c_\w+\.weight$",
        fixed={
            "n_inner": None,
            "activation_function": "gelu_new",
            "embd_pdrop": lambda c: c.dropout_p,
            "attn_pdrop": lambda c: c.dropout_p,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )

    tie_embeddings: bool = True
    num_heads: Size = 6
    max_positions: Size = 1024
    norm_eps: Epsilon = 1e-5

    @property
    def norm(self) -> LayerNorm.Config:
        return LayerNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def positions(self) -> LearnedPositional.Config:
        return LearnedPositional.Config(self.max_positions, self.dim, self.init_std)

    def block(self, layer: int) -> DecoderBlock.Config:
        attention = Attention.Config(
            self.dim,
            self.num_heads,
            bias=True,
            out_bias=True,
            dropout_p=self.dropout_p,
            **self.common,
        )
        mlp = MLP.Config(self.dim, 4 * self.dim, "gelu_tanh", **self.common)
        return DecoderBlock.Config(
            attention,
            mlp,
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )
