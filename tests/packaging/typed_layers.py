"""Types of the layers, as type checkers see them: mypy reads this file, and nothing runs it.

A wrong call that mypy accepted would leave its `type: ignore` unused, which is an error.
"""

import torch

from omniattn.modules import (
    ALiBi,
    Attention,
    LayerNorm,
    MoE,
    MultiTokenPredictor,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    TransformerXLAttention,
)


def right() -> list[torch.nn.Module]:
    norm: RMSNorm = RMSNorm(32)
    return [
        norm,
        RMSNorm(32, eps=1e-5, dtype=torch.bfloat16),
        RMSNorm(RMSNorm.Config(32), device="cpu"),
        Attention(512, 8, causal=False),
        Residual(torch.nn.Identity(), LayerNorm.Config(2), "post"),
        Residual(torch.nn.Identity(), Residual.Config(LayerNorm.Config(2)), device="cpu"),
        MultiTokenPredictor(64, block=torch.nn.Identity),
        MultiTokenPredictor(MultiTokenPredictor.Config(64), torch.nn.Identity),
        MoE(8, 16, 4, 2, shared_hidden_dim=8, router="sigmoid", device="cpu"),
        RotaryEmbedding(RotaryEmbedding.Config(8)),
        ALiBi(8, device="cpu"),
        TransformerXLAttention(64, 2, biases=None),
    ]


def wrong() -> None:
    RMSNorm("32")  # type: ignore[call-overload]
    RMSNorm(32, epsilon=1e-5)  # type: ignore[call-overload]
    RMSNorm(RMSNorm.Config(32), 1e-5)  # type: ignore[call-overload]
    Attention(512)  # type: ignore[call-overload]
    Attention(512, 8, causal="yes")  # type: ignore[call-overload]
    RMSNorm(32, device=1)  # type: ignore[call-overload]
    RMSNorm.Config(32, device="cpu")  # type: ignore[call-arg]
    LayerNorm(RMSNorm.Config(32))  # type: ignore[call-overload]
    RotaryEmbedding(8, dtype=torch.float32)  # type: ignore[call-overload]
    ALiBi(8, dtype=torch.float32)  # type: ignore[call-overload]
    Residual(LayerNorm.Config(2))  # type: ignore[call-overload]
    MultiTokenPredictor(64)  # type: ignore[call-overload]
    MoE(8, 16)  # type: ignore[call-overload]
