"""Layers of the two weighted means with r . k in the exponent, and the layer of xLSTM-7B."""

import pytest
import torch

from omniattn import functional as F
from omniattn.modules import LargeMLSTM, Mamba, RWKVQuadratic, RWKVRecurrent

X = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def built(kind, **options):
    torch.manual_seed(0)
    layer = kind(12, 3, init_std=0.5, **options, dtype=torch.float64)
    torch.nn.init.normal_(layer.decay)
    return layer


@pytest.mark.parametrize("per_channel", [False, True])
def test_layers_compute_the_means_of_their_projections(per_channel):
    for kind, mean in ((RWKVQuadratic, F.rwkv_quadratic), (RWKVRecurrent, F.rwkv_recurrent)):
        layer = built(kind, per_channel=per_channel)
        parts = (layer.r_proj, layer.k_proj, layer.v_proj)
        r, k, v = (part(X).unflatten(-1, (3, 4)) for part in parts)
        y = mean(r, k, v, torch.nn.functional.softplus(layer.decay), backend="reference")
        y = y if isinstance(y, torch.Tensor) else y[0]
        torch.testing.assert_close(layer(X), layer.o_proj(y.flatten(-2)))
        layer(X).sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        assert layer.decay.grad.abs().max() > 0


@torch.no_grad()
def test_only_the_recurrent_mean_has_a_state_that_does_not_grow():
    sizes = [
        [built(kind).new_state(2, length).nbytes for length in (8, 64)]
        for kind in (RWKVQuadratic, RWKVRecurrent)
    ]
    assert sizes[0][1] == 8 * sizes[0][0] and sizes[1][1] == sizes[1][0] == 2 * 3 * 12 * 8
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., :3] = False
    for kind in (RWKVQuadratic, RWKVRecurrent):
        layer = built(kind, per_channel=True)
        torch.testing.assert_close(layer(X, mask=mask)[0, 3:], layer(X[:1, 3:])[0])


def test_decays_start_as_those_of_alibi():
    layer = RWKVRecurrent(16, 4, per_channel=True)
    w = torch.nn.functional.softplus(layer.decay)
    torch.testing.assert_close(w, F.alibi_slopes(4)[:, None].expand(4, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RWKVQuadratic(12, 4, 2), "RWKVQuadratic: num_kv_heads must be None, got num_kv_h"),
        (lambda: LargeMLSTM(12, 4), "LargeMLSTM: qk_dim must be a multiple of num_heads, got qk_d"),
        (lambda: LargeMLSTM(16, 4, v_dim=6), "v_dim must be a multiple of num_heads, got v_dim=6"),
        (lambda: Mamba(12, num_heads=5), "Mamba: inner must be a multiple of num_heads, got inner"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_large_mlstm_is_the_cell_with_capped_gates_a_norm_per_head_and_a_sigmoid_gate():
    torch.manual_seed(0)
    layer = LargeMLSTM(12, 3, qk_dim=6, gate_cap=0.5, init_std=0.5, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = (
        part(X).unflatten(-1, (3, -1)) for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    i, f = (0.5 * torch.tanh(gate(X) / 0.5) for gate in (layer.igate, layer.fgate))
    h, _ = F.mlstm(q, k, v, i, f, backend="reference")
    normed = torch.nn.functional.layer_norm(h, (4,), eps=1e-6).flatten(-2) * layer.norm_weight
    torch.testing.assert_close(layer(X), layer.o_proj(layer.g_proj(X).sigmoid() * normed))
