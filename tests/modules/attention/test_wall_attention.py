"""WallAttention: its formula, packed sequences, decoding."""

import pytest
import torch

from omniattn.functional import wall_attention
from omniattn.modules import KVCache, WallAttention

F64 = torch.float64
FULL = {"scalar_gate": True, "gate": True, "bias": True}


def made(**options):
    torch.manual_seed(0)
    layer = WallAttention(24, 4, 2, init_std=0.5, gate_bias=1.0, dtype=F64, **options)
    return layer, torch.randn(2, 9, 24, dtype=F64)


@pytest.mark.parametrize("options", [{}, FULL])
def test_the_formula(options):
    layer, x = made(**options)
    layers = layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj
    q, k, v, g = (p(x).unflatten(-1, (-1, 6)) for p in layers)
    scalar = torch.nn.functional.logsigmoid(layer.gs_proj(x)) if options else None
    g = torch.nn.functional.logsigmoid(g)
    out = wall_attention(q, k, v, g, scalar, backend="reference").flatten(-2)
    want = layer.o_proj(out * layer.o_gate_proj(x).sigmoid() if options else out)
    torch.testing.assert_close(layer(x), want)
    nested = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.tensor([0, 9, 18]))
    torch.testing.assert_close(layer(nested).values(), want.flatten(0, 1))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, FULL])
def test_decoding(options):
    layer, x = made(**options)
    state = layer.new_state(2, 9)
    parts = [layer(part, state=state) for part in x.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def test_new_gates_keep_almost_all():
    assert WallAttention(8, 2).g_proj.bias.eq(8).all()


def test_errors():
    layer, x = made()
    with pytest.raises(TypeError, match=r"^WallAttention: state must be a PathCache, got"):
        layer(x, state=KVCache(2, 9, 2, 6))
    with pytest.raises(ValueError, match=r"^WallAttention: mask must be None"):
        layer(x, mask=torch.ones(9, 9, dtype=torch.bool))
