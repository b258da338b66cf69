"""Calls, saved configs and imports may use the names from before a rename."""

import pickle

import pytest
import torch

from omniattn import functional, reference
from omniattn.functional import masks
from omniattn.modules import Attention, GatedLinearAttention

Q = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", [functional.attention, reference.attention])
def test_functions_accept_normaliser(attention):
    expected = attention(Q, Q, Q, normalizer="sigmoid")
    assert not torch.equal(expected, attention(Q, Q, Q))
    assert torch.equal(attention(Q, Q, Q, normaliser="sigmoid"), expected)
    with pytest.raises(TypeError, match="both 'normalizer' and 'normaliser', its former name"):
        attention(Q, Q, Q, normaliser="sigmoid", normalizer="sigmoid")


def test_layers_accept_the_former_fields():
    config = Attention.Config(8, 2, normalizer="sigmoid")
    assert Attention.Config(8, 2, normaliser="sigmoid") == config
    assert Attention(8, 2, normaliser="sigmoid").config == config
    layer = GatedLinearAttention(8, 2, gate_normaliser=4.0)
    assert layer.config == GatedLinearAttention.Config(8, 2, gate_normalizer=4.0)
    with pytest.raises(TypeError, match="both 'gate_normalizer' and 'gate_normaliser'"):
        GatedLinearAttention.Config(8, 2, gate_normaliser=4.0, gate_normalizer=4.0)


def test_saved_configs_have_the_former_fields():
    config = Attention.Config(8, 2, normalizer="sigmoid")
    saved = pickle.dumps(config)
    old = saved.replace(b"normalizer", b"normaliser")
    assert old != saved
    assert pickle.loads(old) == config == pickle.loads(saved)


def test_masks_have_both_spellings():
    assert masks.Neighbourhood is masks.Neighborhood
    assert masks.GridNeighbourhood is masks.GridNeighborhood
