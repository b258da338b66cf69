"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").

Random words are functions of position: a word is Philox(counter, key). The key is the 64-bit seed;
the counter combines tensor indices and an offset, which the caller advances by one per op. So masks
do not depend on device, tiling and layout. A seed is an int64 tensor [seed, offset].

uint32 arithmetic uses int64: products wrap modulo 2^64, so both 32-bit halves are exact.
"""

import torch

_LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ELEMENTWISE = 0x454C454D  # counter word 2 of elementwise draws, "ELEM"

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def new_seed() -> torch.Tensor:
    """Draws [seed, offset] (2,) int64 on the CPU, from torch's default generator."""
    drawn = torch.randint(2**63 - 1, (), device="cpu")
    return torch.stack([drawn, torch.zeros_like(drawn)])


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Computes ten rounds on int64 tensors of uint32 values, which broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32) & _LOW32 ^ c1 ^ k0,
            p1 & _LOW32,
            (p0 >> 32) & _LOW32 ^ c3 ^ k1,
            p0 & _LOW32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3


def _words(counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor], seed: torch.Tensor) -> Words:
    key = (seed[0] & _LOW32, (seed[0] >> 32) & _LOW32)
    return philox4x32((*counter, seed[1] & _LOW32), key)


def _interleave(words: Words, n: int) -> torch.Tensor:
    """Returns words (..., n): position j is word j & 3 of group j >> 2 of (..., ceil(n / 4))."""
    return torch.stack(words, -1).flatten(-2)[..., :n]


def elementwise_words(n: int, seed: torch.Tensor) -> torch.Tensor:
    """Returns the uint32 words of flat indices 0..n-1, as int64 (n,)."""
    group = torch.arange((n + 3) // 4, device=seed.device)
    counter = (group & _LOW32, group >> 32, torch.full_like(group, _ELEMENTWISE))
    return _interleave(_words(counter, seed), n)


def uniform(n: int, seed: torch.Tensor) -> torch.Tensor:
    """Returns uniform fp32 numbers (n,) in [0, 1), of 24 random bits each."""
    return (elementwise_words(n, seed) >> 8).float() * 2.0**-24


def normal(n: int, seed: torch.Tensor) -> torch.Tensor:
    """Returns standard normal fp32 (n,): Box-Muller's cosine branch of uniforms 2 i and 2 i + 1."""
    radius, angle = uniform(2 * n, seed).view(n, 2).unbind(-1)
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * torch.pi * angle)


def elementwise_keep(shape: torch.Size, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Returns the keep mask of elementwise dropout with probability p."""
    return (elementwise_words(shape.numel(), seed) >= int(p * 2**32)).view(shape)


def attention_keep(
    batch: int,
    heads: int,
    tq: int,
    tk: int,
    p: float,
    seed: torch.Tensor,
    *,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
    all_heads: int | None = None,
) -> torch.Tensor:
    """Returns the keep mask (B, Hq, Tq, Tk) of attention dropout with probability p.

    `first` has the indices b, h, q and k of its first pair in a call with `all_heads` heads.
    """
    b, h, q, k = first
    before = k % 4  # in the group of the first key
    key_group = torch.arange(k // 4, (k + tk + 3) // 4, device=seed.device)
    query = torch.arange(q, q + tq, device=seed.device)[:, None]
    entry = torch.arange(b, b + batch, device=seed.device)[:, None] * (all_heads or heads)
    head = (entry + torch.arange(h, h + heads, device=seed.device)).reshape(-1, 1, 1)
    words = _interleave(_words((key_group, query, head), seed), before + tk)[..., before:]
    return (words >= int(p * 2**32)).view(batch, heads, tq, tk)
