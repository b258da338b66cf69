"""SimpleSelectiveSSM: its formula token by token, initial decays."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import SimpleSelectiveSSM


@pytest.mark.parametrize("a_dep", [False, True])
def test_formula(a_dep):
    torch.manual_seed(0)
    layer = SimpleSelectiveSSM(dim=6, d_state=5, a_dep=a_dep, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    state, expected = torch.zeros(2, 5, 6, dtype=torch.float64), []
    for token in x.unbind(1):
        decay = layer.a_proj(token).sigmoid() if a_dep else torch.exp(-nnf.softplus(layer.a))
        state = (
            state * decay.expand(2, 5)[..., None] + layer.b_proj(token)[..., None] * token[:, None]
        )
        h = (layer.c_proj(token)[..., None] * state).sum(1)
        mlp = layer.mlp.down_proj(nnf.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        expected.append(mlp * token)
    torch.testing.assert_close(layer(x), torch.stack(expected, 1))


def test_autocast_gives_its_dtype():
    layer, x = SimpleSelectiveSSM(dim=6, d_state=5, init_std=0.5), torch.randn(2, 9, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)


def test_initial_decays():
    decays = torch.exp(-nnf.softplus(SimpleSelectiveSSM(dim=4, d_state=16).a.detach()))
    torch.testing.assert_close(decays, 1 - 2.0 ** -torch.arange(1.0, 17.0))
