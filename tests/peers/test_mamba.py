"""mamba-ssm's own tests of its scans, norms and layers, and its references, which need no GPU."""

import mamba_on_ours
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
        **mamba_on_ours.NAMES,
    },
    {},
    {
        "torch.cuda.is_available()": "True",
        # Sizes of the tests of Mamba-3, which take minutes on a CPU.
        "batch = 128": "batch = 2",
        "batch = 16": "batch = 2",
        "seqlen = 2345": "seqlen = 100",
        "seqlen = 2048": "seqlen = 100",
        "[2345, 2346, 2347, 2348, 2349, 2350, 2351, 2352]": "[1, 9, 17, 33, 64, 65, 3, 40]",
        "nheads = 32": "nheads = 8",
    },
)
LONGEST, WIDEST = 512, 2048
#: File, and most cases of each function. Tests in `tests/ops/tilelang` and `cute` are of kernels.
FILES = {
    "tests/ops/test_selective_scan.py": 8,
    "tests/ops/triton/test_selective_state_update.py": 4,
    "tests/ops/triton/test_layernorm_gated.py": 8,
    "tests/ops/triton/test_mamba3_siso.py": 2,
    "tests/ops/triton/test_ssd.py": 2,
    "tests/modules/test_mamba3_varlen.py": 2,
}
OTHER = {"mamba_inner_fn": "values up to 5e8, of which float32 has no 2e-3; smaller ones below"}


def fits(**given: object) -> bool:
    """True if the CPU's eager references take only seconds."""
    return given.get("seqlen", 0) <= LONGEST and given.get("dim", 0) <= WIDEST


CASES = []
if PEER.present:
    THEIRS = PEER.load("mamba_ssm/ops/selective_scan_interface.py")
    THEIRS.selective_scan_fn = THEIRS.selective_scan_ref  # of which mamba_inner_ref is made
    STEP = PEER.load("mamba_ssm/ops/triton/selective_state_update.py")
    NORM = PEER.load("mamba_ssm/ops/triton/layernorm_gated.py")
    PEER.names |= {n: vars(THEIRS)[n] for n in ("selective_scan_ref", "mamba_inner_ref")}
    PEER.names |= {"selective_state_update_ref": STEP.selective_state_update_ref}
    PEER.names |= {"rms_norm_ref": NORM.rms_norm_ref}
    CASES = [case for path, most in FILES.items() for case in PEER.cases(path, most, fits, OTHER)]


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
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("constant", ["", "B", "BC"])
def test_their_reference_of_the_layer(is_complex, constant):
    of_scan = selective(None, True, is_complex)
    channels, states = of_scan["A"].shape
    rows = 3 + (2 - len(constant)) * states * (1 + is_complex)
    given = {"xz": torch.randn(2, 2 * channels, 40), "conv1d_weight": torch.randn(channels, 1, 4)}
    given |= {"conv1d_bias": of_scan["D"], "x_proj_weight": torch.randn(rows, channels)}
    given["delta_proj_weight"] = torch.randn(channels, 3) / 3
    given |= {"out_proj_weight": torch.randn(7, channels), "out_proj_bias": torch.randn(7)}
    given |= {name: of_scan[name] for name in ("A", "D", "delta_bias", *constant)}

    def run(function):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        out = function(**leaves)
        return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    for ours, theirs in zip(run(compat.mamba_inner_fn), run(THEIRS.mamba_inner_ref), strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


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
