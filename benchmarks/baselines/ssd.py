"""The scan of Mamba-2 as transformers computes it without kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import lacks
from omniattn import reference

#: Chunk size; faster here than the 128 and 256 of released models.
CHUNK = 64


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from transformers.models.mamba2 import modeling_mamba2 as module

    lacks(cu_seqlens=cu_seqlens is not None, float64=x.dtype == torch.float64)
    lacks(empty=x.numel() == 0)
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    if x.shape[1] > 1 or dt_limit != (0.0, math.inf):
        options |= {"dt_limit": dt_limit, "initial_states": initial_state}
        y, state = module.mamba2_chunk_scan(
            x, dt, A, B, C, CHUNK, **options, return_final_states=True
        )
        y = y if z is None else y * F.silu(z)
        return y.to(x.dtype), state
    heads, size, width = x.shape[2], x.shape[3], B.shape[3]
    state = x.new_zeros(len(x), heads, size, width) if initial_state is None else initial_state
    state = state.clone()
    for name in ("D", "dt_bias"):
        given = options[name]
        if isinstance(given, Tensor):
            options[name] = given[:, None].expand(heads, size)
    rates = A[:, None, None].expand(heads, size, width)
    steps = dt[:, 0, :, None].expand(-1, -1, size)
    gate = None if z is None else z[:, 0]
    y = module.mamba2_selective_state_update(
        state, x[:, 0], steps, rates, B[:, 0], C[:, 0], z=gate, **options
    )
    return y[:, None], state


def mamba3(*args: Any, theta: Tensor | None = None, **options: Any) -> Any:
    state = [options.pop(name, None) for name in ("h", "last_k", "last_v")]
    lacks(initial_state=theta is not None or any(t is not None for t in state))
    y, after = reference.mamba3(*args, **options)
    return y, *after


BASELINES = {"ssd": {"hf": ssd}, "mamba3": {"eager": mamba3}}
