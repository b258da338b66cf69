"""RoBERTa: BERT with positions counted from the tokens that are no padding."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.encoders.bert import MaskedConfig
from omniattn.models.encoders.text_encoder import HF_FIXED, HF_OPTIONS, hf_weights
from omniattn.models.hf import Counterpart, Renames
from omniattn.modules.base.fields import Epsilon, Size, SizeOrZero

#: Names of the head's weights in transformers, also in Longformer.
HF_HEAD: Renames = (
    (r"^head_transform", "lm_head.dense"),
    (r"^head_norm", "lm_head.layer_norm"),
    (r"^head_bias", "lm_head.bias"),
)


@dataclass(frozen=True)
class PaddedPositionsConfig(MaskedConfig):
    """Sizes and options shared by RoBERTa and Longformer.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, token_types, dropout_p: as in
            BertConfig.
        max_positions: number of learned positions, of which padding_id + 1 belong to no token.
        padding_id: id of the token that fills up short sequences. It takes no position; the
            positions of others start at padding_id + 1.
    """

    norm_eps: Epsilon = 1e-5
    max_positions: Size = 514
    token_types: Size = 1
    padding_id: SizeOrZero = 1


@dataclass(frozen=True)
class RobertaConfig(PaddedPositionsConfig):
    """Config of a RoBERTa, a :class:`Bert` whose positions do not count padding.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, token_types, dropout_p: as in
            BertConfig.
        max_positions: number of learned positions, of which padding_id + 1 belong to no token.
        padding_id: id of the token that fills up short sequences. It takes no position; the
            positions of others start at padding_id + 1.

    Reference:
        Liu et al., "RoBERTa", 2019, arXiv 1907.11692.
    """

    architecture = "roberta"
    hf = Counterpart(
        "RobertaForMaskedLM",
        HF_OPTIONS | {"padding_id": "pad_token_id"},
        (*hf_weights("roberta"), *HF_HEAD),
        fixed=HF_FIXED | {"is_decoder": False, "tie_word_embeddings": True},
    )
