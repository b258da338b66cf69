"""Convolutions as long as the sequence: `fla.modules.conv.long_conv`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_int
from omniattn.compat._errors import require_form, require_optional, require_real
from omniattn.reference.precision import widen


def fft_conv(
    u: Tensor,
    k: Tensor,
    dropout_mask: Tensor | None,
    gelu: bool = True,
    k_rev: Tensor | None = None,
) -> Tensor:
    """Computes ``act(k * u + u)``, causal convolutions of channels plus their inputs.

    Args:
        u: (B, H, T).
        k: (H, T') or (1, H, T'), the filters, of which the first T taps are read.
        dropout_mask: (B, H), factors of the result, or None.
        gelu: True for GELU, False for no function.
        k_rev: of the shape of k: filters of later inputs, whose first tap is that of u_t, or None.
    """
    op = "fft_conv"
    require_real(op, u=u, k=k)
    require_optional(op, dropout_mask=dropout_mask, k_rev=k_rev)
    require_form(op, "u", u, "B, H, T")
    steps = u.shape[-1]
    size = 2 * steps
    taps = torch.fft.rfft(widen(k)[..., :steps], n=size)
    if k_rev is not None:
        taps = taps + torch.fft.rfft(widen(k_rev)[..., :steps], n=size).conj()
    wide = widen(u).to(taps.real.dtype)
    y = torch.fft.irfft(torch.fft.rfft(wide, n=size) * taps, n=size)[..., :steps] + wide
    if gelu:
        y = nnf.gelu(y)
    return (y if dropout_mask is None else y * dropout_mask[..., None]).to(u.dtype)


class LongConvolution(nn.Module):
    """Causal convolution of (B, T, hidden_size) with learned filters of max_len taps, plus x."""

    def __init__(self, hidden_size: int, max_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.filter = nn.Parameter(torch.randn(hidden_size, max_len))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps (B, T, hidden_size) to the same shape."""
        return fft_conv(x.mT, self.filter, None, gelu=False).mT


class PositionalEmbedding(nn.Module):
    """Times t in [0, 1], and cosines and negative sines of (emb_dim - 1) / 2 frequencies."""

    def __init__(self, emb_dim: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__()
        require_int("PositionalEmbedding", "emb_dim", emb_dim, 3)
        self.seq_len, bands = seq_len, (emb_dim - 1) // 2
        time = torch.linspace(0, 1, seq_len)[:, None]
        places = torch.arange(seq_len)[:, None] * (2 * math.pi / seq_len)
        angles = torch.linspace(1e-4, bands - 1, bands) * places
        table = torch.cat((time, angles.cos(), -angles.sin()), -1)
        self.z = nn.Parameter(table[None], requires_grad=False)

    def forward(self, L: int) -> Tensor:
        """Returns the embeddings (1, L, emb_dim) of the first L positions."""
        return self.z[:, :L]


class ImplicitLongConvolution(nn.Module):
    """Convolution as of :class:`LongConvolution`, whose filters an MLP computes from positions."""

    def __init__(
        self, hidden_size: int, max_len: int, d_emb: int = 3, d_hidden: int = 16, **kwargs: Any
    ) -> None:
        super().__init__()
        if d_emb % 2 == 0 or d_emb < 3:
            raise ValueError(
                f"ImplicitLongConvolution: d_emb must be odd and at least 3, got {d_emb=}"
            )
        self.hidden_size, self.d_emb = hidden_size, d_emb
        self.pos_emb = PositionalEmbedding(d_emb, max_len)
        self.mlp = nn.Sequential(
            nn.Linear(d_emb, d_hidden), nn.ReLU(), nn.Linear(d_hidden, hidden_size)
        )

    def filter(self, seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the filters (1, hidden_size, seq_len)."""
        taps: Tensor = self.mlp(self.pos_emb(seq_len))
        return taps.mT

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps (B, T, hidden_size) to the same shape."""
        return fft_conv(x.mT, self.filter(x.shape[1]), None, gelu=False).mT
