"""Hashes of the last tokens, which number the rows of n-gram embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_device,
    require_integers,
    require_shape,
    require_tensor,
)
from omniattn.checks.packed import require_all_tokens
from omniattn.reference.values import require_all_rows

__all__ = ["ngram_hashes"]


def ngram_hashes(
    tokens: Tensor,
    multipliers: Tensor,
    sizes: Tensor,
    *,
    pad: int = 0,
    before: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Hashes the n-grams that end at each token, n = 2, ..., N, each by several moduli (Engram).

    ``hash[t, n, j] = (xor of multipliers[k] tokens[t - k] over k < n) mod sizes[n - 2, j]``.

    Args:
        tokens: (B, T) int64, numbers of tokens.
        multipliers: (N,) int64, N >= 2, odd numbers; products wrap around at 64 bits.
        sizes: (N - 1, J) int64 above 0, best different primes.
        pad: token in place of those before the sequence.
        before: (B, N - 1) int64, the tokens before the sequence, the oldest first, or None.
        cu_seqlens: boundaries of packed sequences, of which B is 1, as in
            :func:`causal_conv1d`; without `before`.

    Returns:
        (B, T, N - 1, J) int64, from 0 to sizes - 1.

    Raises:
        TypeError: a dtype that is not int64.
        ValueError: a shape or device that does not fit.

    Reference:
        DeepSeek-AI, Conditional Memory via Scalable Lookup, 2026, arXiv 2601.07372. Verified
        against engram_demo_v1.py of deepseek-ai/Engram at commit 11a020e.

    Example:
        >>> multipliers, sizes = torch.tensor([1, 3]), torch.tensor([[5, 7]])
        >>> ngram_hashes(torch.tensor([[4, 2]]), multipliers, sizes)
        tensor([[[[4, 4]],
        <BLANKLINE>
                 [[4, 0]]]])
    """
    op = "ngram_hashes"
    given = {"tokens": tokens, "multipliers": multipliers, "sizes": sizes}
    given |= {} if before is None else {"before": before}
    for name, t in given.items():
        require_tensor(op, name, t)
        if t.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be int64, got {name}.dtype={t.dtype}")
        require_device(op, name, t, tokens, "tokens")
    if tokens.ndim != 2:
        raise ValueError(f"{op}: tokens must have shape (B, T), got {tuple(tokens.shape)}")
    longest = multipliers.numel()
    if multipliers.ndim != 1 or longest < 2 or sizes.ndim != 2 or len(sizes) != longest - 1:
        raise ValueError(
            f"{op}: multipliers must have shape (N,) with N >= 2 and sizes (N - 1, J), got "
            f"multipliers.shape={tuple(multipliers.shape)}, sizes.shape={tuple(sizes.shape)}"
        )
    batch, steps = tokens.shape
    if before is None:
        before = tokens.new_full((batch, longest - 1), pad)
    else:
        require_shape(op, "before", before, (batch, longest - 1))
        if cu_seqlens is not None:
            raise ValueError(f"{op}: before must be None with cu_seqlens, got both")
    whole, age = torch.cat((before, tokens), 1), None
    if cu_seqlens is not None:
        require_integers(op, "cu_seqlens", cu_seqlens)
        require_device(op, "cu_seqlens", cu_seqlens, tokens, "tokens")
        if cu_seqlens.ndim != 1 or not len(cu_seqlens) or batch != 1:
            raise ValueError(
                f"{op}: cu_seqlens must have shape (S + 1,) and tokens B=1 with it, got "
                f"cu_seqlens.shape={tuple(cu_seqlens.shape)}, tokens.shape={tuple(tokens.shape)}"
            )
        if not require_all_tokens(op, cu_seqlens, steps):
            require_all_rows(op, cu_seqlens, steps)
        places = torch.arange(steps, device=tokens.device)
        starts = torch.searchsorted(cu_seqlens.long(), places, right=True) - 1
        age = places - cu_seqlens.long()[starts]
    mixed, found = tokens * multipliers[0], []
    for k in range(1, longest):
        earlier = whole[:, longest - 1 - k : longest - 1 - k + steps]
        if age is not None:
            earlier = torch.where(age >= k, earlier, pad)
        mixed = mixed ^ (earlier * multipliers[k])
        found.append(mixed[..., None] % sizes[k - 1])
    return torch.stack(found, 2)
