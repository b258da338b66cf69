"""Differential attention: its definition, DiffLlama's wiring, decoding."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from layer_checks import assert_same_gradients, in_steps
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from omniattn.modules import DifferentialAttention, RotaryEmbedding

CONFIG = DifferentialAttention.Config(48, 4, depth=3, num_kv_heads=2, init_std=0.4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_hand(layer: DifferentialAttention, x: torch.Tensor) -> torch.Tensor:
    """Head by head, from the text of the paper."""
    c = layer.config
    q, k = (p(x).unflatten(-1, (-1, c.head_size)) for p in (layer.q_proj, layer.k_proj))
    v = layer.v_proj(x).unflatten(-1, (-1, 2 * c.head_size))
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    factor = 1.0
    if c.form != "simple":
        factor = (
            (layer.lambda_q1 @ layer.lambda_k1).exp()
            - (layer.lambda_q2 @ layer.lambda_k2).exp()
            + c.lambda_init
        )
    group = c.num_heads // c.kv_heads
    heads = []
    for h in range(c.num_heads):
        maps = []
        for i in range(2):
            s = 2 * (h // group) + i if c.gqa_map == "flash" else (2 * h + i) // group
            scores = q[:, :, 2 * h + i] @ k[:, :, s].transpose(1, 2) / c.head_size**0.5
            maps.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        out = (maps[0] - factor * maps[1]) @ v[:, :, h // group]
        if c.form != "simple":
            out = F.rms_norm(out, out.shape[-1:], layer.subln.weight, 1e-5) * (1 - c.lambda_init)
        heads.append(out)
    return layer.o_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("form", ["published", "simple"])
@pytest.mark.parametrize("gqa_map", ["flash", "naive"])
def test_equals_the_definition(form, gqa_map):
    layer = DifferentialAttention(replace(CONFIG, form=form, gqa_map=gqa_map)).double()
    x = torch.randn(2, 9, 48, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual, expected, [x, *layer.parameters()])


def test_equals_diffllama():
    config = transformers.DiffLlamaConfig(
        hidden_size=48, num_attention_heads=8, num_key_value_heads=4, rms_norm_eps=1e-5
    )
    config._attn_implementation = "eager"
    theirs = DiffLlamaAttention(config, 3)
    layer = DifferentialAttention(replace(CONFIG, form="hf", rope_interleaved=False))
    theirs.load_state_dict(layer.state_dict())
    assert theirs.lambda_init == pytest.approx(layer.config.lambda_init)
    x = torch.randn(2, 9, 48)
    cos, sin = RotaryEmbedding(RotaryEmbedding.Config(6))(torch.arange(9))
    twice = tuple(torch.cat([t, t], -1)[None] for t in (cos, sin))
    causal = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e30)
    expected, _ = theirs(x, twice, causal)
    torch.testing.assert_close(layer(x, rope=(cos, sin)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["published", "hf"])
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(form):
    layer = DifferentialAttention(replace(CONFIG, form=form, window_size=(4, 0)))
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(2, 11, 48)
    full = layer(x, rope=rotary(torch.arange(11)))
    steps, cache = in_steps(layer, x, rotary)
    torch.testing.assert_close(steps, full, rtol=1e-4, atol=2e-5)
    # As many bytes as multi-head attention of the same width and groups.
    assert cache.nbytes == 2 * 11 * 2 * 2 * 12 * 4


def test_bfloat16_keeps_lambda_in_fp32():
    layer = DifferentialAttention(CONFIG, dtype=torch.bfloat16)
    assert layer.lambda_q1.dtype == torch.float32
    out = layer(torch.randn(1, 5, 48).bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.lambda_q1.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"dim": 50}, "dim=50"),
        ({"form": "x"}, "form must be one of .* got form='x'"),
        ({"gqa_map": "y"}, "gqa_map must be one of .* got gqa_map='y'"),
        ({"form": "hf", "gqa_map": "naive"}, "with form='hf'"),
    ],
)
def test_config_names_the_wrong_value(values, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **values)
