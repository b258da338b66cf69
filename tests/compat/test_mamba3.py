"""mamba-ssm's Mamba-3 layer: packed sequences, states of its inference parameters, steps."""

from types import SimpleNamespace

import pytest
import torch

from omniattn import modules
from omniattn.compat import mamba_ssm


@torch.no_grad()
@pytest.mark.parametrize("several", [False, True])
def test_states_and_packed_sequences(several):
    torch.manual_seed(0)
    layer = mamba_ssm.Mamba3(12, 8, headdim=6, is_mimo=several, mimo_rank=2, layer_idx=3).double()
    torch.nn.init.normal_(layer.in_proj.weight)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    y = layer(x)
    given = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    parts = [layer(x[:, :3], inference_params=given)]
    given.seqlen_offset = 3
    states = given.key_value_memory_dict[3]
    parts += [layer.step(x[:, 3], *states)[0][:, None]]
    parts += [layer(x[:, 4:], inference_params=given)]
    torch.testing.assert_close(torch.cat(parts, 1), y)
    packed = layer(x.view(1, 12, 12), cu_seqlens=torch.tensor([0, 6, 12]))
    torch.testing.assert_close(packed.view_as(y), y)
    own = modules.Mamba3(12, 8, headdim=6, is_mimo=several, mimo_rank=2).double()
    own.load_state_dict(layer.state_dict())
    torch.testing.assert_close(own(x), y)


def test_other_steps():
    with pytest.raises(NotImplementedError, match=r"dt_max must be 0\.1"):
        mamba_ssm.Mamba3(12, dt_max=0.2)


def test_heavy_tail():
    found = mamba_ssm.heavy_tail_activation(torch.tensor([-1.0, 0.0, 2.0]))
    assert found.tolist() == [0.5, 1.0, 3.0]


def test_layers_have_their_sizes_as_attributes():
    mamba, two, three = (
        mamba_ssm.Mamba(8, d_state=3, dt_rank=2),
        mamba_ssm.Mamba2(8, d_state=3, headdim=4),
        mamba_ssm.Mamba3(8, d_state=4, headdim=4, is_mimo=True, mimo_rank=2),
    )
    for layer, states in ((mamba, 3), (two, 3), (three, 4)):
        sizes = layer.d_model, layer.d_state, layer.expand, layer.d_inner
        assert sizes == (8, states, 2, 16)
    assert (mamba.dt_rank, mamba.d_conv) == (2, 4) and (two.nheads, two.ngroups) == (4, 1)
    assert (three.nheads, three.num_bc_heads, three.mimo_rank) == (4, 1, 2)
