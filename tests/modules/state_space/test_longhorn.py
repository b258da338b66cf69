"""The layer of Longhorn: the form of its authors, decoding in place, parameters."""

import torch
from torch.nn import functional as nnf

from omniattn.modules import Longhorn


def test_the_step_of_its_authors():
    """The state is their matrix (B, D, N): (1 - dt k^2) S + dt k x, with dt = b / (1 + b |k|^2)."""
    torch.manual_seed(0)
    m = Longhorn(12, d_state=5, dt_rank=3, init_std=0.3, dtype=torch.float64)
    torch.nn.init.normal_(m.D)
    torch.nn.init.normal_(m.dt_head.bias)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    u, z = m.in_proj(x).chunk(2, -1)
    u = nnf.conv1d(u.mT, m.conv1d.weight, m.conv1d.bias, padding=3, groups=24).mT[:, :9]
    u = nnf.silu(u)
    r, keys, queries = m.x_proj(u).split((3, 5, 5), -1)
    state, rows = torch.zeros(2, 24, 5, dtype=torch.float64), []
    for t in range(9):
        k, b = keys[:, t], torch.sigmoid(m.dt_head(r[:, t]) + m.dt_head.bias)
        dt = b / (1 + b * k.square().sum(-1, keepdim=True))
        written = dt * u[:, t]
        state = state * (1 - dt[..., None] * k[:, None] ** 2) + written[..., None] * k[:, None]
        rows.append(torch.einsum("bdn,bn->bd", state, queries[:, t]))
    y = m.out_proj((torch.stack(rows, 1) + m.D * u) * nnf.silu(z))
    torch.testing.assert_close(m(x), y)


@torch.no_grad()
def test_single_tokens_update_the_state_in_place():
    torch.manual_seed(0)
    m, x = Longhorn(8, d_state=20, init_std=0.5), torch.randn(3, 6, 8)
    state = m.new_state(3, 6)
    memory = state["ssm"]
    y = torch.cat([m(x[:, t : t + 1], cache=state) for t in range(6)], 1)
    assert state["ssm"] is memory
    torch.testing.assert_close(y, m(x), rtol=1e-4, atol=1e-6)
    assert dict(m.named_parameters()).keys() == {
        *("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight"),
        *("dt_head.weight", "dt_head.bias", "D", "out_proj.weight"),
    }
