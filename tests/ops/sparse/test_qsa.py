"""Sparse attention of Qwen4 (QSA), of an indexer of compressed keys and selected blocks."""

import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextConfig,
    Qwen4ExpTextQSAIndexer,
    apply_rotary_pos_emb,
)

from omniattn import functional as F

BATCH, LENGTH, RATIO, BUDGET, HEADS, DIM = 2, 27, 4, 8, 8, 8


def test_an_indexer_of_windows_and_selected_blocks():
    """Each query attends to the chosen whole windows and to the tokens after the last one."""
    torch.manual_seed(0)
    indexer = Qwen4ExpTextQSAIndexer(
        Qwen4ExpTextConfig(
            hidden_size=16,
            indexer_n_heads=HEADS,
            indexer_kv_heads=1,
            indexer_head_dim=DIM,
            indexer_budget=BUDGET,
            indexer_compress_ratio=RATIO,
            head_dim=DIM,
            eos_token_id=1,
        ),
        0,
    ).double()
    for norm in (indexer.q_layernorm, indexer.k_layernorm):
        torch.nn.init.normal_(norm.weight, std=0.3)
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64)
    angles = torch.randn(BATCH, LENGTH, DIM // 4, dtype=torch.float64).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()  # of the first half of a head
    causal = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    seen = causal & indexer(x, tables, causal, None)

    q, k = indexer.index_qk_proj(x).unflatten(-1, (-1, DIM)).split((HEADS, 1), 2)
    q = apply_rotary_pos_emb(indexer.q_layernorm(q), None, *tables, unsqueeze_dim=2)
    whole = slice(0, LENGTH // RATIO * RATIO)
    keys = indexer.k_layernorm(k[:, whole].unflatten(1, (-1, RATIO)).mean(2))
    first = (t[:, whole][:, ::RATIO] for t in tables)
    keys = apply_rotary_pos_emb(keys, None, *first, unsqueeze_dim=2)[:, :, 0]
    index = F.dsa_indexer(q, keys, None, BUDGET // RATIO, key_stride=RATIO, past=0)
    after = torch.arange(1, LENGTH + 1)
    tail = torch.where(after % RATIO > 0, after // RATIO, -1).expand(BATCH, -1)[..., None]
    blocks = torch.cat((index, tail.int()), 2)[:, None]

    heads = torch.randn(3, BATCH, LENGTH, 2, 6, dtype=torch.float64)
    found = F.selected_attention(*heads, blocks, block_size=RATIO, causal=True)
    torch.testing.assert_close(found, F.attention(*heads, mask=seen))
