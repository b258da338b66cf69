"""Rows of goals.py for time-invariant state-space models: kernels and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from baselines.structured import vandermonde

from goal_rows.goal import PASSES, Row, provider, tensors
from omniattn import functional
from omniattn.testing.spec import Function

LENGTH = 4096


def convolved(u: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Convolves by one FFT of all channels."""
    size = 2 * LENGTH
    product = torch.fft.rfft(u.mT, n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(product)[..., :LENGTH].mT


def rows_of(
    name: str,
    inputs: dict[str, torch.Tensor],
    ours: Function,
    yardstick: Function,
    against: str,
    flops: float = 0.0,
) -> Iterator[Row]:
    for pass_ in PASSES:
        sweeps = 1 if pass_ == "forward" else 3
        calls: tuple[Any, Any] = tuple(provider(pass_, inputs, f) for f in (ours, yardstick))
        yield Row(name, pass_, *calls, against, 0.25, flops=sweeps * flops, memory=0.1)


def generating_function(Lambda, P, B, C, dt, length):
    """Computes S4's kernel as in the paper: sums over (H, N, L / 2) tensors at roots of -1, the
    Woodbury identity, and a dense power that truncates it."""
    a, b, c = (torch.cat((t, t.conj()), -1) for t in (Lambda, B, C))
    p = torch.cat((P, P.conj()), -1)
    dense = torch.diag_embed(a) - p[..., None] * p.conj()[..., None, :]
    ab, _ = functional.discretize(dense, b, dt, "bilinear")
    c = c.conj() + (c.conj()[:, None] @ torch.linalg.matrix_power(ab, length))[:, 0]
    taps = torch.arange(length // 2)
    tan = ((4 * taps + 1) * (torch.pi / (2 * length))).tan()
    poles = 1 / (2j * tan - (dt[:, None] * a)[..., None])
    products = (c * b, c * p, p.conj() * p, p.conj() * b)
    cb, cp, pp, pb = (dt[:, None] * (v[..., None] * poles).sum(1) for v in products)
    transform = torch.fft.ifft((1 + 1j * tan) * (cb - cp * pb / (1 + pp)))
    turned = transform * torch.polar(torch.ones_like(tan), taps * (torch.pi / length))
    return torch.cat((turned.real, -turned.imag), -1)


def s4_rows() -> Iterator[Row]:
    """S4's kernel and convolution against the generating function in torch and one FFT."""
    channels, states = 512, 64
    Lambda, P, B = (t.expand(channels, -1) for t in functional.nplr(states)[:3])
    c, u = tensors((channels, states // 2, 2), (1, LENGTH, channels))
    pairs = {name: torch.view_as_real(t) for name, t in {"a": Lambda, "p": P, "b": B}.items()}
    named = {"u": u, **{name: t.contiguous() for name, t in pairs.items()}, "c": c}
    dt = torch.logspace(-3, -1, channels)

    def ours(u, **terms):
        return functional.s4(u, *map(torch.view_as_complex, terms.values()), dt)

    def yardstick(u, **terms):
        terms = map(torch.view_as_complex, terms.values())
        return convolved(u, generating_function(*terms, dt, LENGTH))

    name = f"s4 H{channels} N{states} L{LENGTH}"
    yield from rows_of(name, named, ours, yardstick, "generating function and FFT")


def s4d_rows() -> Iterator[Row]:
    """S4D's kernel and convolution against the sum over an (H, N, L) tensor and one FFT."""
    channels, pairs = 512, 32
    a, c, u = tensors((channels, pairs, 2), (channels, pairs, 2), (1, LENGTH, channels))
    decay, phase = -0.5 * a[..., 0].exp(), torch.pi * torch.arange(pairs).expand(channels, pairs)
    named = {"u": u, "real": decay, "imaginary": phase.contiguous(), "c": c}
    dt = torch.logspace(-3, -1, channels)

    def ours(u, real, imaginary, c):
        return functional.s4d(u, torch.complex(real, imaginary), torch.view_as_complex(c), dt)

    def yardstick(u, real, imaginary, c):
        poles = torch.complex(real, imaginary)
        steps = poles * dt[:, None]
        factors = torch.view_as_complex(c) * steps.expm1() / poles
        pair = (torch.view_as_real(t) for t in (factors, steps))
        return convolved(u, vandermonde(*pair, length=LENGTH))

    name, flops = f"s4d H{channels} N{2 * pairs} L{LENGTH}", 4.0 * channels * pairs * LENGTH
    yield from rows_of(name, named, ours, yardstick, "einsum and FFT", flops)


def rows() -> Iterator[Row]:
    yield from s4d_rows()
    yield from s4_rows()
