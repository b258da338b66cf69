"""fla's short convolutions: `fla.modules.conv` and `fla.modules.token_shift`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int, require_shape
from omniattn.compat._cp import FLACPContext, boundaries_of_rank, rows_of_ranks
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_optional,
    require_real,
)
from omniattn.compat.causal_conv1d import causal_conv1d_update as update
from omniattn.functional.recurrences._common import require_boundaries


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.causal_conv1d` plus a residual.

    Args:
        x: (B, T, D), or (B, T, H, D / H).
        weight: (D, W).
        bias: (D,), or None.
        residual: of the shape of x, added after the activation, or None.
        initial_state: (N, D, W), the W inputs before x with the newest last; the convolution reads
            W - 1 of them.
        output_final_state: if True, also returns the last W inputs.
        activation: None, "silu" or "swish".
        backend: "triton", "cuda" or "mix"; has no effect.
        cu_seqlens: (N + 1,) int, for B = 1: rows cu_seqlens[n] .. cu_seqlens[n + 1] are sequence n.
        cu_seqlens_cpu, chunk_indices: have no effect.
        cp_context: None, or this rank's part of the row, see `build_cp_context`. A rank must have W
            tokens or more.

    Returns:
        y of the shape and dtype of x, and the final state (N, D, W) or None.
    """
    op = "causal_conv1d"
    require_choice(op, "backend", backend, ("triton", "cuda", "mix"))
    require_real(op, x=x, weight=weight)
    require_optional(op, bias=bias, residual=residual, initial_state=initial_state)
    if x.ndim < 3 or weight.ndim != 2:
        raise ValueError(
            f"{op}: x must have shape (B, T, D) and weight (D, W), got x.shape={tuple(x.shape)}, "
            f"weight.shape={tuple(weight.shape)}"
        )
    rows, width = x.flatten(2), weight.shape[1]
    if cp_context is not None:
        cu_seqlens = boundaries_of_rank(op, cp_context, cu_seqlens)
        taps = cp_context.conv1d_kernel_size
        if taps not in (None, width):
            raise ValueError(
                f"{op}: cp_context.conv1d_kernel_size must be None or the width of weight, got "
                f"cp_context.conv1d_kernel_size={taps}, weight.shape={tuple(weight.shape)}"
            )
    sequences = len(rows) if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None:
        require_shape(op, "initial_state", initial_state, (sequences, rows.shape[2], width))
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, silu or swish, got {activation=}")
    if residual is not None:
        require_shape(op, "residual", residual, tuple(x.shape))
    if cp_context is not None:
        rows, initial_state = rows_of_ranks(op, cp_context, rows, width, initial_state)
    wide = torch.promote_types(x.dtype, weight.dtype)
    with errors_of(op):
        y = functional.causal_conv1d(
            rows.to(wide),
            weight.to(wide),
            None if bias is None else bias.to(wide),
            activation=None if activation is None else "silu",
            initial_state=None if initial_state is None else initial_state[..., 1:].to(wide),
            cu_seqlens=cu_seqlens,
        )
    y = y.to(x.dtype).view(x.shape)
    if residual is not None:
        y = y + residual.to(x.dtype)
    final = _last_inputs(rows, width, initial_state, cu_seqlens) if output_final_state else None
    return y, final


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves one step of each sequence and updates `cache` in place, for inference.

    Args:
        x: (N, D), (N, 1, D) or (1, N, D).
        cache: (N, D, W), the last W inputs.
        residual: of the shape of x, or None.
        weight: (D, W).
        bias: (D,), or None.
        activation: None, "silu" or "swish".

    Returns:
        y of the shape of x, and `cache`.
    """
    op = "causal_conv1d_update"
    if weight is None:
        raise ValueError(f"{op}: weight must be given, got weight=None")
    require_real(op, x=x, weight=weight, cache=cache)
    step = x.reshape(-1, weight.shape[0])
    if x.ndim < 2 or cache.ndim != 3 or cache.shape[:2] != step.shape:
        raise ValueError(
            f"{op}: x must have one step of each sequence of cache (N, D, W), got "
            f"x.shape={tuple(x.shape)}, cache.shape={tuple(cache.shape)}"
        )
    y = update(step, cache, weight, bias, activation).view(x.shape)
    return y if residual is None else y + residual.to(y.dtype), cache


class ShortConvolution(nn.Conv1d):
    """Convolution of each channel over the last `kernel_size` steps.

    Args:
        hidden_size: number of channels.
        kernel_size: number of taps.
        bias: if True, there is a bias.
        activation: None, "silu" or "swish".
        backend: has no effect.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_int("ShortConvolution", "kernel_size", kernel_size, 1)
        if activation not in (None, "silu", "swish"):
            raise ValueError(
                f"ShortConvolution: activation must be None, silu or swish, got {activation=}"
            )
        require_choice("ShortConvolution", "backend", backend, ("triton", "cuda"))
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes :func:`causal_conv1d`.

        Args:
            x: (B, T, D).
            residual: of the shape of x, added to the result.
            mask: (B, T), 0 for padding.
            cache: (N, D, W), the last inputs; updated in place if there is one step for each
                sequence.
            output_final_state: if True, also returns the last W inputs.
            cu_seqlens: (N + 1,) int, see :func:`causal_conv1d`; not with `mask`.
            chunk_indices: has no effect.

        Returns:
            y of the shape of x, and the cache or None.
        """
        op = "ShortConvolution"
        require_real(op, x=x)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError(f"{op}: mask must be None with cu_seqlens")
            require_shape(op, "mask", mask, tuple(x.shape[:2]))
            x = x * mask[..., None].to(x.dtype)
        sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        if cache is not None and x.shape[0] * x.shape[1] == sequences:
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight[:, 0],
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes :func:`causal_conv1d_update`."""
        if cache is None:
            sequences = x.shape[0] * x.shape[1]
            cache = x.new_zeros(sequences, self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(
            x, cache, residual, self.weight[:, 0], self.bias, self.activation
        )
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the previous token minus the token: ``y[t] = x[t - 1] - x[t]``.

    Args:
        x: (B, T, D).
        cu_seqlens: (N + 1,) int, for B = 1: boundaries of packed sequences.
        cache: (N, D) or (N, 1, D), the tokens before x; None for zeros.
        output_cache: if True, also returns the last tokens (N, D).
        chunk_indices: has no effect.
    """
    op = "token_shift"
    require_real(op, x=x)
    require_optional(op, cache=cache)
    require_flags(op, output_cache=output_cache)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (B, T, D), got x.shape={tuple(x.shape)}")
    sequences = len(x)
    if cu_seqlens is not None:
        require_boundaries(op, cu_seqlens, x, "x")
        sequences = len(cu_seqlens) - 1
    if cache is None:
        cache = x.new_zeros(sequences, x.shape[2])
    else:
        cache = cache.reshape(-1, x.shape[2])
        require_shape(op, "cache", cache, (sequences, x.shape[2]))
    if cu_seqlens is None:
        before = torch.cat((cache[:, None].to(x.dtype), x), 1)
        last = before[:, -1]
        before = before[:, :-1]
    else:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        filled = ends > starts
        before = x.roll(1, 1).index_put(
            (torch.zeros_like(starts[filled]), starts[filled]), cache[filled].to(x.dtype)
        )
        tokens = x[0, (ends - 1).clamp(min=0)] if x.shape[1] else cache.to(x.dtype)
        last = torch.where(filled[:, None], tokens, cache.to(x.dtype))
    return (before - x, last) if output_cache else before - x


def token_shift_cp(
    x: Tensor,
    cp_context: FLACPContext,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes :func:`token_shift` of a row whose tokens are split over ranks.

    Args:
        x: (1, T, D), this rank's tokens.
        cp_context: result of `build_cp_context`.
        cu_seqlens: None, or equal to cp_context.cu_seqlens.
        chunk_indices: has no effect.
    """
    op = "token_shift_cp"
    own = boundaries_of_rank(op, cp_context, cu_seqlens)
    require_real(op, x=x)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (1, T, D), got x.shape={tuple(x.shape)}")
    x, before = rows_of_ranks(op, cp_context, x, 1, None)
    y = token_shift(x, own, None if before is None else before[..., 0])
    assert isinstance(y, Tensor)
    return y


def _last_inputs(x: Tensor, width: int, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the last inputs (N, D, width), of the state where a sequence is shorter."""
    if cu_seqlens is None:
        before = x.new_zeros(len(x), x.shape[2], width) if state is None else state.to(x.dtype)
        return torch.cat((before, x.mT), -1)[..., -width:]
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    offsets = torch.arange(-width, 0, device=x.device)
    places = ends + offsets
    rows = torch.cat((x[0], x.new_zeros(1, x.shape[2])))  # the last row is for no state
    outside = torch.full_like(places, len(rows) - 1)
    if state is not None:
        first = len(rows) + width * torch.arange(len(starts), device=x.device)[:, None]
        outside = first + width + places - starts
        rows = torch.cat((rows, state.mT.flatten(0, 1).to(x.dtype)))
    return rows[torch.where(places >= starts, places, outside)].mT
