"""The kernels of state-spaces/s4, in plain torch, against ours with their parameters."""

import peers
import pytest
import torch

from omniattn import functional as F

PEER = peers.Peer(
    "s4",
    ("pytorch_lightning", "src"),
    {"rank_zero_only": lambda function: function},
    {},
)
H, N = 3, 16


def complex_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(parameter.detach())


@pytest.mark.slow
@peers.require(PEER)
@pytest.mark.parametrize("length", [63, 64])
def test_their_kernel_of_s4(length):
    """The peer replaces C by C (I - Ab^L) in its first call, and does not conjugate C."""
    torch.manual_seed(0)
    theirs = PEER.load("models/s4/s4.py").SSMKernelDPLR(
        d_model=H, d_state=N, l_max=length, verbose=False
    )
    C = complex_of(theirs.C)[0].clone()
    kernel, _ = theirs()
    dt, A, B, _, P, _ = theirs._get_params()
    system = A.detach(), P[0].detach(), B[0].detach(), C.conj(), dt.detach().flatten()
    found = F.s4_kernel(*(t.resolve_conj() for t in system), length)
    torch.testing.assert_close(found, kernel[0].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@peers.require(PEER)
def test_their_kernel_of_s4d():
    torch.manual_seed(0)
    theirs = PEER.load("models/s4/s4d.py").S4DKernel(H, N=N)
    A = torch.complex(-theirs.log_A_real.exp(), theirs.A_imag).detach()
    C, dt = complex_of(theirs.C), theirs.log_dt.exp().detach()
    expected = theirs(100)
    torch.testing.assert_close(F.s4d_kernel(A, C, dt, 100), expected.detach(), rtol=1e-4, atol=1e-5)
