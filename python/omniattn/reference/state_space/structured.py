"""Sums of structured state-space models, over the states of a channel."""

import torch


def vandermonde(c: torch.Tensor, x: torch.Tensor, length: int) -> torch.Tensor:
    """y_l = 2 Re sum_n c_n e^(l x_n), l < length; c, x (H, N, 2) hold (re, im) -> (H, L)."""
    steps = torch.arange(length, dtype=x.dtype, device=x.device)
    wide_c, wide_x = torch.view_as_complex(c.contiguous()), torch.view_as_complex(x.contiguous())
    return 2 * (wide_c[..., None] * (wide_x[..., None] * steps).exp()).real.sum(1)


def cauchy(v: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y_l = sum_n v_n / (z_l - w_n) + conj(v_n) / (z_l - conj(w_n)).

    v, w (H, N, 2), z (L, 2) -> (H, L, 2), each as pairs (re, im).
    """
    at, of, pole = (torch.view_as_complex(t.contiguous()) for t in (z, v, w))
    of, pole = of[..., None], pole[..., None]
    return torch.view_as_real((of / (at - pole) + of.conj() / (at - pole.conj())).sum(1))
