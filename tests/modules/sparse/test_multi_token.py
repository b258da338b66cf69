"""MultiTokenAttention: its start, its norm, its state, errors."""

import math

import pytest
import torch

from omniattn import functional
from omniattn.modules import Attention, MultiTokenAttention

F64 = torch.float64


def made(**changes):
    torch.manual_seed(0)
    sizes = {"query_size": 3, "key_size": 5, "init_std": 0.5} | changes
    return MultiTokenAttention(12, 4, 2, dtype=F64, **sizes)


def test_it_starts_as_attention():
    layer, x = made(head_norm=False), torch.randn(2, 7, 12, dtype=F64)
    plain = Attention(12, 4, 2, dtype=F64)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if "kernel" not in n})
    torch.testing.assert_close(layer(x), plain(x))


def test_the_formula():
    layer, x = made(depth=2, head_group=4), torch.randn(2, 7, 12, dtype=F64)
    for parameter in (layer.kernel, layer.head_kernel, layer.norm.weight):
        torch.nn.init.normal_(parameter)
    q, k, v = (p(x).unflatten(-1, (-1, 3)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = functional.multi_token_attention(q, k, v, layer.kernel, layer.head_kernel)
    out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    want = layer.o_proj(out.flatten(-2) * (1 - (0.8 - 0.6 * math.exp(-0.6))))
    torch.testing.assert_close(layer(x), want)


@torch.no_grad()
def test_the_state_goes_back():
    layer, x = made(), torch.randn(2, 9, 12, dtype=F64)
    torch.nn.init.normal_(layer.kernel)
    state = layer.new_state(2, 9)
    layer(x[:, :4], state=state)
    layer(x[:, 5:8], state=state)
    state.crop(4)
    saved = state.state_dict()
    state = layer.new_state(2, 9)
    state.load_state_dict(saved)
    assert state.nbytes == 2 * 9 * (2 * 2 + 4) * 3 * 8
    torch.testing.assert_close(layer(x[:, 4:], state=state), layer(x)[:, 4:])
    with pytest.raises(TypeError, match=r"state must be a QueryCache, got .*=KVCache"):
        layer(x, state=Attention(12, 4, 2, dtype=F64).new_state(2, 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_size": 4}, "key_size must be odd, got key_size=4"),
        ({"head_group": 3}, "head_group must divide num_heads, got head_group=3, num_heads=4"),
    ],
)
def test_sizes_must_fit(changes, message):
    with pytest.raises(ValueError, match=f"MultiTokenAttention: {message}"):
        made(**changes)
