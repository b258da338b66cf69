"""ParallaxAttention: its formula, a start as attention, its state."""

import pytest
import torch

from omniattn import functional
from omniattn.modules import Attention, ParallaxAttention, RotaryEmbedding

F64 = torch.float64


def made(**changes):
    torch.manual_seed(0)
    return ParallaxAttention(16, 4, 2, dtype=F64, **({"init_std": 0.5} | changes))


def test_without_second_queries_it_is_attention():
    layer, x = made(window_size=(3, 0)), torch.randn(2, 7, 16, dtype=F64)
    torch.nn.init.zeros_(layer.r_proj.weight)
    plain = Attention(16, 4, 2, window_size=(3, 0), dtype=F64)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n[0] != "r"})
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("rotated", [False, True])
def test_the_formula(rotated):
    layer, x = made(qk_norm=True, scale=0.3), torch.randn(2, 7, 16, dtype=F64)
    rope = RotaryEmbedding(4)(torch.arange(7)) if rotated else None
    rope = rope and tuple(t.double() for t in rope)

    def heads(name):
        out = layer.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, 4))
        if name != "v":
            weight = layer.get_submodule(f"{name}_norm").weight
            torch.nn.init.normal_(weight, 1)
            out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        if rotated and name != "v":
            out, _ = functional.apply_rotary(out, out, *rope)
        return out

    out = functional.parallax_attention(*(heads(name) for name in "qrkv"), scale=0.3)
    torch.testing.assert_close(layer(x, rope=rope), layer.o_proj(out.flatten(-2)))


@torch.no_grad()
def test_the_state_keeps_keys_and_values():
    layer, x = made(window_size=(3, 0)), torch.randn(2, 9, 16, dtype=F64)
    state = layer.new_state(2, 9)
    assert state.nbytes == 2 * 9 * 2 * 2 * 4 * 8
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    with pytest.raises(ValueError, match="a state must have causal=True"):
        made(causal=False).new_state(2, 9)
