"""DeltaFormerAttention: its formula, decoding, parameters of fla."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.modules import DeltaFormerAttention, RotaryEmbedding


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_formula_and_decoding(qk_norm):
    torch.manual_seed(0)
    config = DeltaFormerAttention.Config(12, 2, init_std=0.5, bias=True, qk_norm=qk_norm)
    layer = config.build(dtype=torch.float64)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    rope = RotaryEmbedding(6)(torch.arange(7))
    rope = tuple(t.double() for t in rope)
    parts = (getattr(layer, f"{name}_proj") for name in "qkv")
    q, k, v = (nnf.linear(x, p.weight, p.bias).unflatten(-1, (2, 6)) for p in parts)
    if qk_norm:
        q, k = (t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-5) for t in (q, k))
    q, k = F.apply_rotary(q, k, *rope)
    beta = nnf.linear(x, layer.b_proj.weight, layer.b_proj.bias)
    o, _ = F.deltaformer_attention(q, k, v, beta, backend="reference")
    y = layer(x, rope=rope)
    torch.testing.assert_close(y, nnf.linear(o.flatten(-2), layer.o_proj.weight))
    state, steps = layer.new_state(2, 7), []
    for a, b in ((0, 3), (3, 4), (4, 7)):
        steps.append(layer(x[:, a:b], state=state, rope=tuple(t[a:b] for t in rope)))
    torch.testing.assert_close(torch.cat(steps, 1), y)


def test_parameters_have_the_names_of_fla():
    layer = DeltaFormerAttention(12, 2, qk_norm=True)
    assert {name for name, _ in layer.named_parameters()} == {
        *(f"{name}_proj.weight" for name in "qkvbo"),
        *("b_proj.bias", "q_norm.weight", "k_norm.weight"),
    }


def test_errors():
    with pytest.raises(ValueError, match="num_kv_heads must be num_heads"):
        DeltaFormerAttention.Config(12, 4, 2)
    layer = DeltaFormerAttention(12, 2)
    with pytest.raises(ValueError, match="mask must be None"):
        layer(torch.ones(1, 2, 12), mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="state must be a KVCache"):
        layer(torch.ones(1, 2, 12), state=object())
