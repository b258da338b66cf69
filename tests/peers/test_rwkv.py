"""The time mixing of RWKV-7 in BlinkDL's package rwkv, whole layers with their weights, on ours."""

import peer_packages
import pytest
import torch

from omniattn import modules

pytestmark = [pytest.mark.slow, peer_packages.require("rwkv", "model.py")]
VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
INNER = ("w0", "w1", "w2", "a0", "a1", "a2", "v0", "v1", "v2", "g1", "g2", "k_k", "k_a", "r_k")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("steps", [1, 40])
def test_time_mix_of_rwkv7(layer, steps, monkeypatch):
    monkeypatch.setenv("RWKV_V7_ON", "1")
    theirs = peer_packages.load("rwkv", "model.py").RWKV_x070_TMix_seq
    torch.manual_seed(0)
    dim, size = 32, 16
    ours = modules.RWKV7TimeMix(dim, head_dim=size, layer_idx=layer, num_layers=2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    x, first = torch.randn(1, steps, dim), torch.randn(1, steps, dim)
    given = {name: p.detach().squeeze() for name, p in ours.named_parameters()}
    zero = torch.zeros(dim)
    inner = [
        given.get(name, zero).flatten() if name == "r_k" else given.get(name, zero)
        for name in INNER
    ]
    matrices = [given[f"{n}.weight"].T for n in ("receptance", "key", "value", "output")]
    expected, *_ = theirs(
        layer,
        dim // size,
        size,
        x[0],
        zero,
        first[0],
        torch.zeros(dim // size, size, size),
        *(given[name] for name in VECTORS),
        *inner,
        *matrices,
        given["ln_x.weight"],
        given["ln_x.bias"],
    )
    y = ours(x, shared={"v_first": first} if layer else {})
    torch.testing.assert_close(y[0], expected, rtol=1e-4, atol=1e-5)
