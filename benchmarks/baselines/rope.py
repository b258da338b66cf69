"""Baselines of rotary embeddings: transformers' formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import compiled, lacks


def hf_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes Llama's, GPT-J's (interleaved) or GPT-NeoX's (partial) formula."""
    lacks(positions=positions is not None, inplace=inplace, start=rotary_start, inverse=inverse)
    size = 2 * cos.shape[-1]
    rotate = rotate_every_two if interleaved else rotate_half
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))
        .to(q.dtype)
        .unsqueeze(-2)
        for t in (cos, sin)
    )

    def turn(x: Tensor) -> Tensor:
        turned = x[..., :size] * cos + rotate(x[..., :size]) * sin
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)

    return turn(q), turn(k)


def hf_qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes Qwen3's norm per head, then the rotation."""
    lacks(casting=casting != "fp32")
    q, k = (
        F.rms_norm(x, x.shape[-1:], w if w is None or not offset else w + offset, eps)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return hf_rotary(
        q, k, cos, sin, positions=positions, rotary_start=rotary_start, interleaved=interleaved
    )


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


BASELINES = {
    "apply_rotary": {"hf": hf_rotary, "compiled": compiled(hf_rotary)},
    "qk_norm_rotary": {"hf": hf_qk_norm_rotary, "compiled": compiled(hf_qk_norm_rotary)},
}
