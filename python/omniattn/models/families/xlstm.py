"""xLSTM-7B: the matrix LSTM cell with capped gates, and SwiGLUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import DecoderBlock, GatedMLP, LargeMLSTM, RMSNorm
from omniattn.modules.base.fields import Epsilon, Size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _share(part: int, whole: int) -> float:
    """Returns a factor of `whole` that transformers rounds down to `part`."""
    factor = part / whole
    return factor if int(whole * factor) == part else (part + 0.5) / whole


def _to_hf(ours: XLSTMConfig) -> dict[str, Any]:
    cell = ours.cell
    for name, width in (("qk_dim", cell.keys), ("v_dim", cell.values)):
        if width % 64:
            raise NotImplementedError(
                f"XLSTMConfig: {name} must be a multiple of 64 in transformers' caches, "
                f"got {name}={width}"
            )
    return {
        "embedding_dim": ours.dim,
        "num_blocks": ours.num_layers,
        "qk_dim_factor": _share(cell.keys, ours.dim),
        "v_dim_factor": _share(cell.values, ours.dim),
        "ffn_proj_factor": _share(ours.hidden_dim, ours.dim),
        "ffn_round_up_to_multiple_of": 1,
        # Ours computes cells in float32, or in float64 for weights of float64.
        "autocast_kernel_dtype": "float32",
    }


def _from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    width, unit = theirs.hidden_size, theirs.ffn_round_up_to_multiple_of
    hidden = int((width * theirs.ffn_proj_factor + unit - 1) // unit * unit)
    keys, values = int(width * theirs.qk_dim_factor), int(width * theirs.v_dim_factor)
    return {
        "hidden_dim": hidden,
        "qk_dim": None if keys == width // 2 else keys,
        "v_dim": None if values == width else values,
    }


@dataclass(frozen=True)
class XLSTMConfig(Decoder.Config):
    """Config of an xLSTM of the form of xLSTM-7B.

    Args:
        num_heads, qk_dim, v_dim, gate_cap: as in LargeMLSTM.
        hidden_dim: hidden size of the SwiGLUs.
        norm_eps: epsilon of all norms.
        cell_eps: constant added to the cells' denominators.
        logit_softcap: cap of the logits, 0 for none.

    Reference:
        Beck et al., "xLSTM 7B", 2025, arXiv 2503.13427.
    """

    architecture = "xlstm"
    hf = Counterpart(
        "xLSTMForCausalLM",
        {
            "vocab_size": "vocab_size",
            "dim": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_heads",
            "gate_cap": "gate_soft_cap",
            "norm_eps": "norm_eps",
            "cell_eps": "eps",
            "logit_softcap": "output_logit_soft_cap",
            "tie_embeddings": "tie_word_embeddings",
        },
        (
            (r"^(?!lm_head)", "backbone."),
            (r"embed_tokens", "embeddings"),
            (r"layers", "blocks"),
            (r"backbone\.norm", "backbone.out_norm"),
            (r"input_layernorm", "norm_mlstm"),
            (r"post_attention_layernorm", "norm_ffn"),
            (r"mixer\.([qkv])_proj", r"mlstm_layer.\1"),
            (r"mixer\.g_proj", "mlstm_layer.ogate_preact"),
            (r"mixer\.([if])gate", r"mlstm_layer.\1gate_preact"),
            (r"mixer\.norm_weight", "mlstm_layer.multihead_norm.weight"),
            (r"mixer\.o_proj", "mlstm_layer.out_proj"),
            (r"mlp\.gate_proj", "ffn.proj_up_gate"),
            (r"mlp\.up_proj", "ffn.proj_up"),
            (r"mlp\.down_proj", "ffn.proj_down"),
        ),
        fixed={"use_bias": False, "add_out_norm": True, "weight_mode": "single"},
        conversions=(Conversion(_to_hf, _from_hf),),
    )

    num_heads: Size = 4
    hidden_dim: Size = 512
    qk_dim: Size | None = None
    v_dim: Size | None = None
    gate_cap: float = 15.0
    norm_eps: Epsilon = 1e-6
    cell_eps: Epsilon = 1e-6
    logit_softcap: float = 30.0

    @property
    def norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def cell(self) -> LargeMLSTM.Config:
        """Config of each layer's token mixer."""
        return LargeMLSTM.Config(
            self.dim,
            self.num_heads,
            self.qk_dim,
            self.v_dim,
            self.gate_cap,
            self.norm_eps,
            self.cell_eps,
            **self.common,
        )

    def block(self, layer: int) -> DecoderBlock.Config:
        return DecoderBlock.Config(
            self.cell,
            GatedMLP.Config(self.dim, self.hidden_dim, **self.common),
            self.norm,
            dropout_p=self.dropout_p,
            residual_in_fp32=self.residual_in_fp32,
        )
