"""Functions of scores and the tensors that they capture, for the tests of score_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

B, HQ, HKV, TQ, TK, D = 2, 4, 2, 37, 150, 8


Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def make_tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    floats = {
        "slopes": torch.rand(HQ),
        "table": torch.randn(16, HQ),
        "bias": torch.randn(B, HQ, TQ, TK),
        "shared": torch.randn(TQ, TK),
        "emb": torch.randn(4, HQ),
        "gate": torch.rand(()),
        "of_q": torch.randn(B, TQ),
        "of_k": torch.randn(TK),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in floats.items()} | {
        "seg": torch.randint(0, 3, (B, TK)),
        "edge": torch.randint(0, 4, (B, TQ, TK)),
    }


#: From captured tensors to a score_mod.
MODS: dict[str, Callable[[dict[str, Tensor]], Mod]] = {
    "identity": lambda t: lambda s, b, h, q, k: s,
    "constant": lambda t: lambda s, b, h, q, k: torch.zeros_like(s) + h,
    "alibi": lambda t: lambda s, b, h, q, k: s - t["slopes"][h] * (q - k).abs(),
    "softcap": lambda t: lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
    "causal": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "relative": lambda t: lambda s, b, h, q, k: s + t["table"][(k - q).abs().clamp(max=15), h],
    "bias": lambda t: lambda s, b, h, q, k: s + t["bias"][b, h, q, k],
    "bias by steps": lambda t: lambda s, b, h, q, k: s + t["bias"][b][h][q][k],
    "transposed bias": lambda t: lambda s, b, h, q, k: s + t["shared"].t()[k, q],
    "rows and columns": lambda t: lambda s, b, h, q, k: s * t["of_q"][b, q] + t["of_k"][k],
    "documents": lambda t: (
        lambda s, b, h, q, k: torch.where(t["seg"][b, q] == t["seg"][b, k], s, s - 2)
    ),
    "edges": lambda t: lambda s, b, h, q, k: s + t["emb"][t["edge"][b, q, k], h],
    "edges from the end": lambda t: lambda s, b, h, q, k: s + t["emb"][-1 - t["edge"][b, q, k], h],
    "gate": lambda t: lambda s, b, h, q, k: s * torch.sigmoid(1 - t["gate"] * (q - k).abs() / 9),
    "windows": lambda t: lambda s, b, h, q, k: s + t["table"][(q // 5 - k // 7) % 16, h],
    "integers": lambda t: lambda s, b, h, q, k: s / (1.0 + q * k % 7) + ((q ^ k) & 3) - (q * 3 | k),
    "branches": lambda t: (
        lambda s, b, h, q, k: torch.where(
            ((q - k > 2) | (b == 1)) & ~(h == 0), s.square(), torch.minimum(s, 0.1 * s)
        )
    ),
    "clamped": lambda t: lambda s, b, h, q, k: s.clamp(-1, 1) + torch.relu(s) * t["gate"],
    "longer": lambda t: lambda s, b, h, q, k: s + t["of_k"][q] * t["of_q"][b, h] + t["emb"][h, 1],
    "temperature": lambda t: lambda s, b, h, q, k: s / (1 + t["of_k"][k].exp() * t["slopes"][h]),
    "masked": lambda t: lambda s, b, h, q, k: s.masked_fill(q % 2 == k % 2, -1.5),
    "sums of truth values": lambda t: (
        lambda s, b, h, q, k: s + ((q >= k) + (k > 9)).float() - ((q >= k) * (k > 9)).float()
    ),
    "buckets": lambda t: lambda s, b, h, q, k: s + t["table"][torch.log2(k + 1.0).long(), h],
    "shifts": lambda t: lambda s, b, h, q, k: s + t["table"][((k << 1) >> 4) % 16, h],
    "detached": lambda t: lambda s, b, h, q, k: s * s.detach().sigmoid(),
}


def make_qkv(dtype: torch.dtype = torch.float64, tq: int = TQ, tk: int = TK) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    shapes = ((B, tq, HQ, D), (B, tk, HKV, D), (B, tk, HKV, D))
    return tuple(torch.randn(*s, dtype=dtype).requires_grad_() for s in shapes)


def gradients_of(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    grad = torch.randn(out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
