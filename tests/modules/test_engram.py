"""Engram: hashes and gates of the official demo, states, packed sequences, errors."""

import itertools
import re

import numpy
import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules import Engram

F64 = torch.float64
SIZES = {"dim": 6, "vocab_size": 40, "table_sizes": (11, 14), "ngram_dim": 8, "num_heads": 2}


def layer(**options):
    torch.manual_seed(0)
    made = Engram(**SIZES, dtype=F64, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def inputs(*shape):
    return torch.randn(2, 9, *shape, 6, dtype=F64), torch.randint(40, (2, 9))


def public_hashes(tokens, multipliers, sizes, pad):
    """NgramHashMapping._get_ngram_hashes of deepseek-ai/Engram, commit 11a020e."""
    steps, found = tokens.shape[1], []
    shifted = [
        numpy.pad(tokens, ((0, 0), (k, 0)), constant_values=pad)[:, :steps]
        for k in range(len(multipliers))
    ]
    for n in range(2, len(multipliers) + 1):
        mix = shifted[0] * multipliers[0]
        for k in range(1, n):
            mix = numpy.bitwise_xor(mix, shifted[k] * multipliers[k])
        found += [mix % size for size in sizes[n - 2]]
    return numpy.stack(found, 2)


def rms(t, scale):
    return t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale


@pytest.mark.parametrize("streams", [1, 2])
def test_the_official_demo(streams):
    """Engram.forward of engram_demo_v1.py in deepseek-ai/Engram, commit 11a020e."""
    ours = layer(num_streams=streams, pad=3)
    x, tokens = inputs(*([streams] if streams > 1 else []))
    hashes = public_hashes(tokens.numpy(), ours.multipliers.numpy(), ours.sizes.tolist(), 3)
    tables = ours.table.split(ours.sizes.flatten().tolist())
    rows = torch.cat([t[hashes[..., n]] for n, t in enumerate(tables)], -1)
    value = rows @ ours.value_proj.weight.T + ours.value_proj.bias
    gated = []
    for s, hidden in enumerate(x.view(2, 9, streams, 6).unbind(2)):
        part = slice(6 * s, 6 * s + 6)
        key = rows @ ours.key_proj.weight[part].T + ours.key_proj.bias[part]
        score = (rms(key, ours.key_scale[s]) * rms(hidden, ours.query_scale[s])).sum(-1) / 6**0.5
        gate = (score.abs().clamp_min(1e-6).sqrt() * score.sign()).sigmoid()
        gated.append(gate[..., None] * value)
    normed = torch.cat([rms(v, ours.conv_scale[s]) for s, v in enumerate(gated)], -1)
    taps = {"groups": 6 * streams, "padding": 9, "dilation": 3}
    conv = nnf.silu(nnf.conv1d(normed.mT, ours.conv_weight, **taps)[..., :9]).mT
    torch.testing.assert_close(ours(x, tokens)[0], (torch.cat(gated, -1) + conv).view_as(x))


def test_tables_have_primes_of_their_own():
    config = Engram.Config(**SIZES, layer_ids=(1, 15), layer_idx=15)
    assert Engram.Config(**SIZES).primes == ((11, 13), (17, 19))
    assert config.primes == ((23, 29), (31, 37))
    multipliers = [Engram(**SIZES, layer_ids=(0, 1), layer_idx=n).multipliers for n in (0, 1)]
    assert (multipliers[0] != multipliers[1]).any() and (multipliers[0] % 2 == 1).all()
    assert multipliers[0].max() < (2**63 - 1) // 40


@torch.no_grad()
def test_steps_equal_the_sequence():
    ours, (x, tokens) = layer(num_streams=2), inputs(2)
    state, parts = None, []
    for a, b in ((0, 1), (1, 2), (2, 6), (6, 6), (6, 9)):
        y, state = ours(x[:, a:b], tokens[:, a:b], state)
        parts.append(y)
    whole, last = ours(x, tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


def test_packed_sequences():
    ours, (x, tokens) = layer(), inputs()
    cuts = [0, 1, 4, 4, 9]
    y, state = ours(x[:1], tokens[:1], cu_seqlens=torch.tensor(cuts))
    alone = [ours(x[:1, a:b], tokens[:1, a:b]) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(y, torch.cat([part for part, _ in alone], 1))
    for n, (_, own) in enumerate(alone):
        torch.testing.assert_close(tuple(t[n : n + 1] for t in state), own)
    more = torch.tensor([0, 2, 2, 4, 5])
    y, state = ours(x[1:, :5], tokens[1:, :5], state, more)
    for n, (a, b) in enumerate(itertools.pairwise(more.tolist())):
        part, own = ours(x[1:, a:b], tokens[1:, a:b], alone[n][1])
        torch.testing.assert_close(y[:, a:b], part)
        torch.testing.assert_close(tuple(t[n : n + 1] for t in state), own)


def test_gradients():
    ours, (x, tokens) = layer(), inputs()
    names = [name for name, _ in ours.named_parameters()]
    leaves = [x[:, :5].requires_grad_(), *ours.parameters()]

    def call(x, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(ours, values, (x, tokens[:, :5]))[0]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layer(layer_idx=2), ValueError, "layer_ids must include layer_idx, got layer_i"),
        (lambda: Engram.Config(6, 40, ()), ValueError, "got table_sizes=()"),
        (lambda: Engram.Config(6, 40, (9,), 9, 2), ValueError, "got ngram_dim=9, num_heads=2"),
        (
            lambda: layer()(torch.ones(2, 3, 5), torch.zeros(2, 3).long()),
            ValueError,
            "Engram: x must have shape (B, T, dim)",
        ),
        (
            lambda: layer()(torch.ones(1, 3, 6).double(), torch.zeros(1, 3)),
            TypeError,
            "ngram_hashes: tokens must be int64, got tokens.dtype=torch.float32",
        ),
        (
            lambda: functional.ngram_hashes(*(torch.ones(2, 2).long(),) * 3),
            ValueError,
            "got multipliers.shape=(2, 2), sizes.shape=(2, 2)",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
