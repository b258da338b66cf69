"""Types of the layers, as type checkers see them: mypy reads this file, and nothing runs it.

A wrong call that mypy accepted would leave its `type: ignore` unused, which is an error.
"""

import torch

from omniattn.modules import Attention, LayerNorm, MultiTokenPredictor, Residual, RMSNorm


def right() -> list[torch.nn.Module]:
    norm: RMSNorm = RMSNorm(32)
    return [
        norm,
        RMSNorm(32, eps=1e-5, dtype=torch.bfloat16),
        RMSNorm(RMSNorm.Config(32), device="cpu"),
        Attention(512, 8, causal=False),
        Residual(torch.nn.Identity(), LayerNorm.Config(2), "post"),
        MultiTokenPredictor(64, block=torch.nn.Identity),
    ]


def wrong() -> None:
    RMSNorm("32")  # type: ignore[call-overload]
    RMSNorm(32, epsilon=1e-5)  # type: ignore[call-overload]
    RMSNorm(RMSNorm.Config(32), 1e-5)  # type: ignore[call-overload]
    Attention(512)  # type: ignore[call-overload]
    Attention(512, 8, causal="yes")  # type: ignore[call-overload]
