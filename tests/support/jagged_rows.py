"""Rows of sequences, jagged nested tensors of them, and layers for both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omniattn.modules import (
    DeepSeekSparseAttention,
    RotaryEmbedding,
)

LENGTHS = (5, 1, 9)
DTYPE = torch.float64


def sequences() -> list[torch.Tensor]:
    return [torch.randn(n, 16, dtype=DTYPE, requires_grad=True) for n in LENGTHS]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


#: A module and a call of it on tokens x at these positions in their sequences.
Case = tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def rotated(config: Any) -> Case:
    layer, rotary = config.build(dtype=DTYPE), RotaryEmbedding(4)
    return layer, lambda x, at: layer(x, rope=rotary(at))


def sparse_latent(stage: str) -> Case:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_dim": 6, "qk_rope_dim": 4, "v_dim": 5}
    sizes |= {"index_heads": 2, "index_dim": 6, "index_topk": 3}
    return rotated(DeepSeekSparseAttention.Config(16, 2, **sizes, stage=stage, **STD))


STD = {"init_std": 0.5}
