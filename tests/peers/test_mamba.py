"""mamba-ssm's own tests of its scan, and its references, which need no GPU."""

import peers
import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat
from omniattn import functional as F

PEER = peers.Peer(
    "mamba",
    ("mamba_ssm", "causal_conv1d", "selective_scan_cuda", "triton"),
    {
        "custom_bwd": lambda function: function,
        "custom_fwd": lambda function: function,
        "mamba_chunk_scan_combined": compat.mamba_chunk_scan_combined,
        "selective_scan_fn": compat.selective_scan_fn,
    },
    {},
)
LONGEST = 512
CASES = []
if PEER.present:
    THEIRS = PEER.load("mamba_ssm/ops/selective_scan_interface.py")
    PEER.names["selective_scan_ref"] = THEIRS.selective_scan_ref
    CASES = PEER.cases(
        "tests/ops/test_selective_scan.py", 8, lambda **given: given.get("seqlen", 0) <= LONGEST
    )


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_mamba_s_own(function, arguments):
    PEER.run(function, arguments)


def selective(groups: int | None, constant: bool, is_complex: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    batch, channels, states, steps = 2, 6, 5, 40
    width = steps * (1 + is_complex)
    rows = (batch, states, width) if groups is None else (batch, groups, states, width)
    A = -torch.rand(channels, states)
    parts = {
        "A": torch.complex(A, 3 * torch.randn(channels, states)) if is_complex else A,
        "B": torch.randn(rows),
        "C": torch.randn(rows),
    }
    if constant:
        dtype = torch.complex64 if is_complex else torch.float32
        parts |= {name: torch.randn(channels, states, dtype=dtype) for name in "BC"}
    varying = {name: torch.randn(batch, channels, steps) for name in ("u", "delta", "z")}
    vectors = {"D": torch.randn(channels), "delta_bias": torch.randn(channels)}
    return varying | parts | vectors


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("groups", "constant"), [(None, False), (2, False), (None, True)])
def test_their_reference_of_the_scan(groups, constant, is_complex):
    """Every form of its docstring, of which their tests run the real one."""
    given = selective(groups, constant, is_complex)

    def run(function):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        y, state = function(**leaves, delta_softplus=True, return_last_state=True)
        loss = y.square().sum() + state.abs().square().sum()
        return [y, state, *torch.autograd.grad(loss, list(leaves.values()))]

    for ours, theirs in zip(
        run(compat.selective_scan_fn), run(THEIRS.selective_scan_ref), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize("with_state", [False, True])
def test_their_minimal_form_of_mamba_2(with_state):
    minimal = PEER.load("mamba_ssm/modules/ssd_minimal.py")
    torch.manual_seed(0)
    x = torch.randn(2, 48, 4, 8, dtype=torch.float64)
    B, C = torch.randn(2, 2, 48, 4, 6, dtype=torch.float64)
    dt = nnf.softplus(torch.randn(2, 48, 4, dtype=torch.float64))
    A = -torch.rand(4, dtype=torch.float64)
    state = torch.randn(2, 4, 8, 6, dtype=torch.float64) if with_state else None
    start = None if state is None else state[:, None]
    expected = minimal.ssd_minimal_discrete(x * dt[..., None], A * dt, B, C, 16, start)
    torch.testing.assert_close(F.ssd(x, dt, A, B, C, initial_state=state), expected)
