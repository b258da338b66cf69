"""Position modules."""

import pytest
import torch

import omniattn.functional as F
from omniattn import reference
from omniattn.modules import (
    ALiBi,
    LearnedPositional,
    RotaryEmbedding,
    SinCosPositional2d,
    SinusoidalPositional,
)


def test_sinusoidal_continues_at_an_offset():
    layer = SinusoidalPositional(SinusoidalPositional.Config(6, "concat", scale_input=True))
    x = torch.randn(2, 5, 6)
    whole = layer(x)
    torch.testing.assert_close(
        whole - x * 6**0.5, F.sinusoidal(torch.arange(5), 6, layout="concat").expand(2, 5, 6)
    )
    torch.testing.assert_close(layer(x[:, 3:], 3), whole[:, 3:])
    torch.testing.assert_close(layer(x[:, 3:], torch.tensor([[3, 4], [3, 4]])), whole[:, 3:])
    assert layer(x.bfloat16()).dtype == torch.bfloat16 and not list(layer.parameters())


def test_sincos_2d_leaves_the_prefix_alone():
    layer, x = SinCosPositional2d(SinCosPositional2d.Config(8, prefix=1)), torch.randn(2, 7, 8)
    y = layer(x, (2, 3))
    assert torch.equal(y[:, 0], x[:, 0])
    torch.testing.assert_close(y[:, 1:] - x[:, 1:], F.sincos_2d(8, 2, 3).expand(2, 6, 8))


def test_learned_positions_never_clamp():
    layer = LearnedPositional(LearnedPositional.Config(4, 3), dtype=torch.float64)
    x = torch.zeros(2, 2, 3, dtype=torch.float64)
    assert torch.equal(layer(x, 1)[0], layer.weight[1:3])
    ids = torch.tensor([[3, 0], [1, 1]], dtype=torch.uint8)
    assert torch.equal(layer(x, ids), layer.weight[ids.long()])
    for wrong in (3, torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"positions must be in \[0, 4\)"):
            layer(x, wrong)


def test_ids_of_any_integer_dtype_and_no_other():
    x = torch.zeros(1, 3, 4)
    scaled = RotaryEmbedding(RotaryEmbedding.Config(4, scaling=reference.DynamicNTKScaling(2.0, 2)))
    learned = LearnedPositional(LearnedPositional.Config(4, 4))
    for dtype in (torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        ids = torch.tensor([2, 0, 1]).to(dtype)
        assert torch.equal(learned(x, ids)[0], learned.weight[[2, 0, 1]])
        assert torch.equal(scaled(ids)[0], scaled(ids.long())[0])
    with pytest.raises(TypeError, match="LearnedPositional: positions must be integers"):
        learned(x, torch.tensor([0.5, 1.0, 2.0]))


def test_learned_positions_are_resized():
    layer = LearnedPositional(LearnedPositional.Config(5, 3, init_std=0.5))
    longer = layer.interpolate(9)
    assert longer.config == LearnedPositional.Config(9, 3, init_std=0.5)
    torch.testing.assert_close(longer.weight, F.interpolate_positions(layer.weight, 9))
    image = layer.interpolate_grid((2, 2), (3, 4), prefix=1)
    assert image.config.max_positions == 13 and torch.equal(image.weight[0], layer.weight[0])


@pytest.mark.parametrize("trainable", [False, True])
def test_alibi(trainable):
    layer = ALiBi(ALiBi.Config(4, trainable=trainable))
    assert torch.equal(layer(3, 5), F.alibi_bias(F.alibi_slopes(4), 3, 5))
    assert layer(1, 2, torch.bfloat16).dtype == torch.bfloat16
    assert [n for n, _ in layer.named_parameters()] == ["slopes"] * trainable
    assert list(layer.state_dict()) == ["slopes"] * trainable


def rotary(**options):
    return RotaryEmbedding(RotaryEmbedding.Config(8, **options))


def test_dynamic_scaling_follows_the_longest_position():
    scaling = reference.DynamicNTKScaling(4.0, 16)
    layer, positions = rotary(scaling=scaling), torch.tensor([[3, 40], [0, 7]])
    theta = F.rope_frequencies(8, scaling=scaling, seq_len=41)
    torch.testing.assert_close(layer(positions), F.rotary_tables(theta, positions))
    torch.testing.assert_close(layer(positions[1:], seq_len=41)[0][0], layer(positions)[0][1])
    plain = F.rotary_tables(F.rope_frequencies(8), positions[1])
    torch.testing.assert_close(layer(positions[1]), plain)
    assert layer(torch.zeros(0).long())[0].shape == (0, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(positions), layer(positions))


def test_sticky_scaling_equals_hugging_face():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_parameters=parameters,
    )
    hf, layer = (
        LlamaRotaryEmbedding(config),
        rotary(scaling=reference.DynamicNTKScaling(4.0, 16), sticky=True),
    )
    for length in (8, 40, 20, 60, 5, 17):
        positions = torch.arange(length)
        expected, _ = hf(torch.zeros(1), positions[None])
        torch.testing.assert_close(layer(positions)[0], expected[0, :, :4], rtol=0, atol=1e-5)
    assert not layer.state_dict()


def test_scaled_tables_carry_the_magnitude():
    scaling = reference.YarnScaling(40.0, 64)
    cos, sin = rotary(scaling=scaling)(torch.arange(9))
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((9, 4), 1.36888))


def test_coordinates():
    positions = torch.randint(9, (3, 2, 5))
    layer = rotary(sections=(1, 2, 1))
    axes = F.mrope_axes((1, 2, 1))
    expected = F.rotary_tables(F.rope_frequencies(8), positions, axes=axes)
    torch.testing.assert_close(layer(positions), expected)
    theta, axes = F.axial_frequencies(8)
    expected = F.rotary_tables(theta, positions[:2], axes=axes)
    torch.testing.assert_close(rotary(num_axes=2)(positions[:2]), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sections=(1, 2)), "sections must add up"),
        (dict(num_axes=0), "num_axes must be an integer >= 1, got num_axes=0"),
        (dict(sections=(5, -1)), "sections must be an int >= 0"),
        (dict(num_axes=3), "multiple of 2 \\* num_axes"),
        (dict(num_axes=2, scaling=reference.LinearScaling(2.0)), "num_axes must be 1"),
        (dict(sticky=True, scaling=reference.LinearScaling(2.0)), "sticky requires"),
    ],
)
def test_bad_rotary_config(options, message):
    with pytest.raises(ValueError, match=message):
        rotary(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary(scaling="yarn"), "scaling must be None, a RopeScaling or a mapping with"),
        (
            lambda: rotary(sections=(2, 2))(torch.arange(2)),
            r"positions must have shape \(2, \.\.\.",
        ),
        (lambda: rotary(num_axes=2)(torch.ones(3, 2).long()), r"got positions\.shape=\(3, 2\)"),
        (lambda: rotary()(5), "positions must be a torch.Tensor, got positions=5"),
        (lambda: SinusoidalPositional.Config(4, layout="x"), "layout must be one of"),
        (lambda: SinCosPositional2d.Config(6), "dim must be a multiple of 4, got dim=6"),
        (lambda: ALiBi.Config(4, form="x"), "form must be one of"),
        (lambda: LearnedPositional.Config(4, 2, init_std=-1.0), "init_std must be"),
        (
            lambda: SinCosPositional2d(SinCosPositional2d.Config(4))(torch.zeros(1, 1, 4), (2, 3)),
            r"x must have shape \(B, 6, 4\) for the grid",
        ),
    ],
)
def test_bad_options_and_shapes(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    "layer",
    [
        SinusoidalPositional(SinusoidalPositional.Config(4)),
        LearnedPositional(LearnedPositional.Config(9, 4)),
    ],
)
def test_nothing_is_broadcast_over_tokens_or_columns(layer):
    x = torch.zeros(2, 3, 4)
    for wrong in (torch.tensor(0), torch.tensor([0]), torch.zeros(3, 3).long()):
        with pytest.raises(ValueError, match="positions must have shape"):
            layer(x, wrong)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 4\)"):
        layer(x[..., :1])
    with pytest.raises(TypeError, match=r"positions must be an int, got positions=1\.5"):
        layer(x, 1.5)
