"""PaTHAttention: its formula, packed sequences, decoding, its cache."""

import pytest
import torch

from omniattn.functional import path_attention
from omniattn.modules import KVCache, PaTHAttention, PathCache

F64 = torch.float64


def made(**options):
    torch.manual_seed(0)
    layer = PaTHAttention(24, 4, 2, init_std=0.5, dtype=F64, **options)
    return layer, torch.randn(2, 9, 24, dtype=F64)


@pytest.mark.parametrize("plain", [True, False])
def test_the_formula(plain):
    layer, x = made(**({"w_rank": None, "conv_size": 0} if plain else {"forget_gate": True}))
    torch.nn.init.normal_(layer.bt_proj.bias)
    q, k, v, w = (
        p(x).unflatten(-1, (-1, 6))
        for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.w_proj)
    )
    g = None
    if not plain:
        padded = torch.nn.functional.pad(w.flatten(-2), (0, 0, 2, 0)).mT
        w = torch.nn.functional.conv1d(padded, layer.w_conv1d.weight, groups=12).mT
        w = torch.nn.functional.silu(w).unflatten(-1, (-1, 6))
        g = torch.nn.functional.logsigmoid(layer.g_proj(x))
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    out = path_attention(q, k, v, w, 2 * layer.bt_proj(x).sigmoid(), g, backend="reference")
    want = layer.o_proj(out.flatten(-2))
    torch.testing.assert_close(layer(x), want)
    nested = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.tensor([0, 9, 18]))
    torch.testing.assert_close(layer(nested).values(), want.flatten(0, 1))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"forget_gate": True, "qk_norm": True}, {"conv_size": 0}])
def test_decoding(options):
    layer, x = made(**options)
    state = layer.new_state(2, 9)
    parts = [layer(part, state=state) for part in x[:, :6].split([4, 1, 1], 1)]
    other = layer.new_state(2, 9)
    other.load_state_dict(state.state_dict())
    other.reorder(torch.tensor([1, 0]))
    rest = layer(x[:, 6:].flip(0), state=other).flip(0)
    torch.testing.assert_close(torch.cat([*parts, rest], 1), layer(x))


def test_the_cache_refuses_what_it_cannot_do():
    layer, x = made()
    with pytest.raises(TypeError, match=r"must be a PathCache, got type.state.=KVCache"):
        layer(x, state=KVCache(2, 9, 2, 6))
    with pytest.raises(ValueError, match=r"^PaTHAttention: mask must be None"):
        layer(x, mask=torch.ones(9, 9, dtype=torch.bool))
    cache = PathCache(1, 4, 2, 3, num_heads=2, taps=2)
    cache.append(torch.ones(1, 3, 2, 3), torch.ones(1, 3, 2, 3))
    with pytest.raises(ValueError, match=r"changed the keys of others cannot be cropped"):
        cache.crop(2)
    with pytest.raises(ValueError, match=r"inputs must have shape .1, 6, 2., got"):
        cache.load_state_dict(cache.state_dict() | {"inputs": torch.zeros(1, 6, 1)})
    cache.crop(0)
    assert cache.length == 0
