"""The cells of NX-AI's xlstm in plain torch against ours: outputs, states and gradients."""

import peer_packages
import pytest
import torch

from omniattn import functional as F

MLSTM, SLSTM = "blocks/mlstm/backends.py", "blocks/slstm/src/vanilla/__init__.py"
pytestmark = [pytest.mark.slow, peer_packages.require("xlstm", MLSTM, SLSTM)]
B, T, H, D = 2, 64, 2, 16


def compare(found, expected, leaves):
    """Tensors, and the gradients of the sum of their squares."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grads = (
        torch.autograd.grad(sum(t.square().sum() for t in each), leaves)
        for each in (found, expected)
    )
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("gate", [-3.0, 0.0, 5.0])
def test_parallel_form_of_mlstm(gate):
    """With an eps of 0 the peer's denominator is exact for any stabiliser."""
    torch.manual_seed(0)
    theirs = peer_packages.load("xlstm", MLSTM).parallel_stabilized_simple
    q, k, v = torch.randn(3, B, T, H, D).unbind()
    leaves = [q, k, v, gate + torch.randn(B, T, H), 3 + torch.randn(B, T, H)]
    leaves = [t.requires_grad_() for t in leaves]
    rows = [t.transpose(1, 2) for t in leaves[:3]]
    gates = [t.transpose(1, 2)[..., None] for t in leaves[3:]]
    expected = theirs(*rows, *gates, eps=0.0).transpose(1, 2)
    compare([F.mlstm(*leaves, eps=0.0)[0]], [expected], leaves)


def test_steps_of_mlstm():
    torch.manual_seed(0)
    theirs = peer_packages.load("xlstm", MLSTM).recurrent_step_stabilized_simple
    q, k, v = torch.randn(3, B, T, H, D).unbind()
    i, f = torch.randn(B, T, H), 3 + torch.randn(B, T, H)
    state = (torch.zeros(B, H, D, D), torch.zeros(B, H, D, 1), torch.zeros(B, H, 1, 1))
    out = []
    for t in range(T):
        rows = (x[:, t, :, None].clone() for x in (q, k, v))
        h, state = theirs(*state, *rows, i[:, t, :, None, None], f[:, t, :, None, None])
        out.append(h[:, :, 0])
    h, final = F.mlstm(q, k, v, i, f)
    torch.testing.assert_close(h, torch.stack(out, 1), rtol=1e-4, atol=1e-5)
    c, n, m = state
    torch.testing.assert_close(final, (c, n[..., 0], m[..., 0, 0]))


def test_slstm():
    torch.manual_seed(0)
    module = peer_packages.load("xlstm", SLSTM)
    x, r, bias = torch.randn(B, T, 4, H, D), torch.randn(4, H, D, D) / 4, torch.randn(4, H, D)
    leaves = [t.requires_grad_() for t in (x, r, bias)]
    weights = r.permute(1, 0, 3, 2).reshape(H, 4 * D, D)
    states, _, _ = module.slstm_forward(
        x.transpose(0, 1).flatten(2),
        torch.zeros(4, B, H * D),
        weights,
        bias.flatten(),
        module.slstm_pointwise_function_registry["slstm"],
    )
    h, final = F.slstm(x + bias, r)
    expected = states[0, 1:].transpose(0, 1).unflatten(-1, (H, D))
    last = states[:, -1].transpose(0, 1).unflatten(-1, (H, D))
    compare([h, final[:, :3]], [expected, last[:, :3]], leaves)
    torch.testing.assert_close(final, last, rtol=1e-4, atol=1e-5)
