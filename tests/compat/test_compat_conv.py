"""Convolutions and chunked scans under the names of causal-conv1d and mamba-ssm."""

import itertools

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat
from omniattn import functional as F

B, T, H, K, V = 2, 9, 2, 4, 6


def convolved(x, weight, bias, before):
    whole = torch.cat((before, x), -1)
    return nnf.silu(nnf.conv1d(whole, weight[:, None], bias, groups=len(weight)))


def test_causal_conv1d_fn():
    torch.manual_seed(0)
    x, weight, bias, before = (torch.randn(*s) for s in ((2, 6, 11), (6, 4), (6,), (2, 6, 3)))
    zeros = torch.zeros_like(before)
    y = compat.causal_conv1d_fn(x, weight, bias, activation="swish")
    torch.testing.assert_close(y, convolved(x, weight, bias, zeros))
    out = torch.empty(2, 6, 3)
    y, final = compat.causal_conv1d_fn(
        x,
        weight,
        bias,
        initial_states=before,
        return_final_states=True,
        final_states_out=out,
        activation="silu",
    )
    torch.testing.assert_close(y, convolved(x, weight, bias, before))
    assert final is out and torch.equal(out, x[..., -3:])
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, -1], [5] * 11])
    y = compat.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")
    for row, start, end in ((0, 0, 3), (0, 3, 7), (0, 7, 8), (0, 8, 10), (1, 0, 11)):
        part = convolved(x[row : row + 1, :, start:end], weight, bias, zeros[:1])
        torch.testing.assert_close(y[row : row + 1, :, start:end], part)
    assert (y[0, :, 10] == 0).all()
    y, final = compat.causal_conv1d_fn(x.half(), weight, bias.bfloat16(), return_final_states=True)
    wide = compat.causal_conv1d_fn(x.half().float(), weight, bias.bfloat16().float())
    assert torch.equal(y, wide.half()) and final.dtype == torch.float16
    state = before.half()
    y = compat.causal_conv1d_update(x[..., 0].half(), state, weight, bias, "silu")
    first = convolved(x, weight, bias, before)[..., 0].half()
    torch.testing.assert_close(y, first, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="initial_states must be None"):
        compat.causal_conv1d_fn(x, weight, seq_idx=seq_idx, initial_states=before)
    with pytest.raises(ValueError, match=r"activation must be None, silu or swish, got .*relu"):
        compat.causal_conv1d_fn(x, weight, activation="relu")


@pytest.mark.parametrize("ring", [False, True])
def test_causal_conv1d_update(ring):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
    expected = compat.causal_conv1d_fn(x, weight, bias, activation="silu")
    states, rows = torch.zeros(5, 6, 5), torch.tensor([4, 1], dtype=torch.int32)
    for first, last in ((0, 1), (1, 3), (3, 4), (4, 9)):
        part = x[..., first] if last - first == 1 else x[..., first:last]
        seen = torch.full((2,), first, dtype=torch.int32) if ring else None
        y = compat.causal_conv1d_update(
            part, states, weight, bias, "silu", cache_seqlens=seen, conv_state_indices=rows
        )
        wanted = expected[..., first] if last - first == 1 else expected[..., first:last]
        torch.testing.assert_close(y, wanted)
    last = x[..., -5:].roll(-1, -1) if ring else x[..., -5:]
    assert torch.equal(states[[4, 1]], last)
    assert (states[[0, 2, 3]] == 0).all()
    with pytest.raises(ValueError, match="conv_state must have shape"):
        compat.causal_conv1d_update(x, torch.zeros(2, 6, 2), weight)


def test_rows_of_padding_change_no_state():
    x, weight, states = torch.randn(3, 6), torch.randn(6, 4), torch.randn(4, 6, 3)
    alone, before = states.clone(), states.clone()
    wanted = compat.causal_conv1d_update(
        x[::2], alone, weight, conv_state_indices=torch.tensor([2, 0])
    )
    y = compat.causal_conv1d_update(x, states, weight, conv_state_indices=torch.tensor([2, -1, 0]))
    assert torch.equal(y[::2], wanted) and torch.equal(states, alone)
    assert y[1].count_nonzero() == 0 and torch.equal(states[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("how", ["rows", "seq_idx", "cu_seqlens"])
def test_mamba_chunk_scan_combined(how):
    """Sequences of 5 and 4 steps, each computed alone."""
    torch.manual_seed(0)
    rows = 1 if how == "cu_seqlens" else B
    x, dt = torch.randn(rows, T, 4, 3), torch.rand(rows, T, 4)
    keys, queries = torch.randn(2, rows, T, 2, 5).unbind()
    A, D, bias, z = -torch.rand(4), torch.randn(4), torch.randn(4), torch.randn(rows, T, 4, 3)
    start = None if how == "cu_seqlens" else torch.randn(rows, 4, 3, 5)
    options = {"D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 1.0)}

    def alone(row, first, last, state):
        part = [t[row : row + 1, first:last] for t in (x, dt, keys, queries, z)]
        own, steps, k, q, gate = part
        return F.ssd(own, steps, A, k, q, z=gate, initial_state=state, **options)

    bounds = (0, 9) if how == "rows" else (0, 5, 9)
    expected, ends = [], []
    for row in range(rows):
        state = None if start is None else start[row : row + 1]
        for first, last in itertools.pairwise(bounds):
            y, end = alone(row, first, last, state)
            expected.append(y)
            ends.append(end)
            state = None
    more = {"initial_states": start, "z": z, "return_final_states": True} | options
    if how == "seq_idx":
        more["seq_idx"] = torch.tensor([[0] * 5 + [1] * 4, [3] * 5 + [2] * 4])
    if how == "cu_seqlens":
        more["seq_idx"] = torch.tensor([[7] * 5 + [1] * 4])
        more |= {"cu_seqlens": torch.tensor(bounds), "return_varlen_states": True}
    y, final, *varlen = compat.mamba_chunk_scan_combined(x, dt, A, keys, queries, 256, **more)
    torch.testing.assert_close(y.flatten(0, 1), torch.cat(expected, 1)[0])
    torch.testing.assert_close(final, torch.cat(ends[len(bounds) - 2 :: len(bounds) - 1]))
    if varlen:
        torch.testing.assert_close(varlen[0], torch.cat(ends))
        other = more | {"cu_seqlens": torch.tensor([0, 0, 5]).int()}  # none, and then the first
        states = compat.mamba_chunk_scan_combined(x, dt, A, keys, queries, 256, **other)[2]
        torch.testing.assert_close(states, torch.cat((torch.zeros_like(ends[0]), ends[0])))
        row, last, states = compat.mamba_chunk_scan_combined(
            x, dt, A, keys, queries, 256, **more | {"seq_idx": None}
        )
        whole, end = alone(0, 0, 9, None)
        torch.testing.assert_close((row, last, states), (whole, end, torch.cat(ends)))
        with pytest.raises(ValueError, match=r"cu_seqlens must be where seq_idx changes, got cu_s"):
            other["seq_idx"] = torch.tensor([[0] * 4 + [1] * 5])
            compat.mamba_chunk_scan_combined(x, dt, A, keys, queries, 256, **other)
    del more["return_final_states"]
    more.pop("return_varlen_states", None)
    alone_y = compat.mamba_chunk_scan_combined(x, dt, A, keys, queries, 256, **more)
    torch.testing.assert_close(alone_y, y)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "expected"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_states_of_mamba_chunk_scan_combined_are_wide(dtype, state_dtype, expected):
    x, keys = torch.ones(1, 3, 2, 4, dtype=dtype), torch.ones(1, 3, 1, 5, dtype=dtype)
    options = {"return_final_states": True, "state_dtype": state_dtype}
    given = x, x[..., 0], -torch.ones(2), keys, keys
    y, final = compat.mamba_chunk_scan_combined(*given, 256, **options)
    assert y.dtype == dtype and final.dtype == expected


@pytest.mark.parametrize("narrow", [("x", "B", "C"), ("x", "z"), ("C",), ("dt", "A", "D", "bias")])
def test_mamba_chunk_scan_combined_of_several_dtypes(narrow):
    """As in its own kernels, each tensor has a dtype of its own, and y that of x."""
    torch.manual_seed(0)
    given = {"x": torch.randn(B, T, 4, 3), "dt": torch.rand(B, T, 4), "A": -torch.rand(4)}
    given |= {"B": torch.randn(B, T, 2, 5), "C": torch.randn(B, T, 2, 5), "D": torch.randn(4)}
    given |= {"z": torch.randn(B, T, 4, 3), "bias": torch.randn(4)}
    given |= {name: given[name].bfloat16() for name in narrow}
    results = []
    for tensors in (given, {name: t.float() for name, t in given.items()}):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        named = {"dt_bias" if name == "bias" else name: t for name, t in leaves.items()}
        y, final = compat.mamba_chunk_scan_combined(
            **named, chunk_size=64, dt_softplus=True, return_final_states=True
        )
        loss = y.float().sum() + final.sum()
        results.append((y, final, *torch.autograd.grad(loss, list(leaves.values()))))
    for found, wide, name in zip(*results, ("x", "final", *given), strict=True):
        kept = torch.float32 if name == "final" else given[name].dtype
        assert found.dtype == kept
        torch.testing.assert_close(found, wide.to(kept))
