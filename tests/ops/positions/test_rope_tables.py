"""Rotary frequencies and tables: published configs, exact angles, several axes."""

import itertools
import math

import pytest
import torch

import omniattn.functional as F
from omniattn import reference
from omniattn.modules import RotaryEmbedding

# name: head size, max_position_embeddings, rope_parameters as published
PUBLISHED = {
    "vicuna 16k": (128, 16384, {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}),
    "internlm2": (128, 32768, {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}),
    "llama 3.1": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2.5 128k": (
        128,
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "gpt-oss": (
        64,
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "deepseek v3": (
        64,
        163840,
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "phi-3 style": (
        96,
        131072,
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.05 * i for i in range(48)],
            "long_factor": [1.0 + i * 1.3 for i in range(48)],
            "original_max_position_embeddings": 4096,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seq_len", [None, 100, 200_000])
def test_scalings_equal_hugging_face(name, seq_len):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, longest, parameters = PUBLISHED[name]
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, torch.device("cpu"), seq_len=seq_len
    )
    scaling = reference.scaling_from_hf(parameters, max_positions=longest)
    for length in (seq_len, None if seq_len is None else torch.tensor(seq_len)):
        theta = F.rope_frequencies(
            head_dim, base=parameters["rope_theta"], scaling=scaling, seq_len=length
        )
        torch.testing.assert_close(theta.float(), expected, rtol=2e-6, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-6)
    written = reference.scaling_to_hf(scaling)
    assert reference.scaling_from_hf(written, max_positions=longest) == scaling
    if parameters["rope_type"] == "dynamic":
        written |= {"original_max_position_embeddings": longest}
    options = {"base": parameters["rope_theta"], "seq_len": seq_len}
    by_name = F.rope_frequencies(head_dim, scaling=written, **options)
    assert torch.equal(by_name, F.rope_frequencies(head_dim, scaling=scaling, **options))
    assert RotaryEmbedding(head_dim, scaling=written).config.scaling == scaling


def test_worked_values_of_the_specification():
    assert reference.YarnScaling(40.0, 4096).magnitude == pytest.approx(1.36888, abs=1e-5)
    assert reference.YarnScaling(4.0, 32768).magnitude == pytest.approx(1.13863, abs=1e-5)
    for dim, base, trained, low, high in [(64, 1e4, 4096, 10, 23), (128, 1e6, 32768, 23, 40)]:
        plain = F.rope_frequencies(dim, base=base)
        scaled = F.rope_frequencies(dim, base=base, scaling=reference.YarnScaling(2.0, trained))
        ratio = plain / scaled
        assert (ratio[: low + 1] == 1).all() and ratio[low + 1] > 1
        assert (ratio[high:] == 2).all() and ratio[high - 1] < 2
    ntk = F.rope_frequencies(8, scaling=reference.NTKScaling(4.0))
    torch.testing.assert_close(ntk, F.rope_frequencies(8, base=1e4 * 4 ** (8 / 6)))


def test_scalings_that_change_nothing():
    plain = F.rope_frequencies(16)
    for scaling, seq_len in [
        (reference.YarnScaling(1.0, 64), None),
        (reference.DynamicNTKScaling(4.0, 64), 64),
        (reference.LongRopeScaling((1.0,) * 8, (9.0,) * 8, 4.0, 64), 64),
        (reference.NTKScaling(1.0), None),
    ]:
        assert torch.equal(F.rope_frequencies(16, scaling=scaling, seq_len=seq_len), plain)
    assert reference.YarnScaling(1.0, 64).magnitude == 1
    assert F.rope_frequencies(2, scaling=reference.NTKScaling(4.0)) == 1  # Dr - 2 = 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_positions_of_any_integer_dtype(dtype):
    positions = torch.tensor([[0, 1, 127]])
    got = F.rotary_tables(F.rope_frequencies(6), positions.to(dtype))
    torch.testing.assert_close(got, F.rotary_tables(F.rope_frequencies(6), positions))


def test_angles_at_a_million_are_exact():
    """Against arithmetic with 50 digits."""
    from decimal import Decimal, getcontext

    getcontext().prec = 50
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
    dim = 128
    theta = [Decimal(10) ** (Decimal(-8 * i) / dim) for i in range(dim // 2)]  # base 10^4
    for p in (999_983, 10**6, -(10**6)):
        cos, sin = F.rotary_tables(F.rope_frequencies(dim), torch.tensor(p), torch.float64)
        turned = [float((p * t) % (2 * pi)) for t in theta]
        exact = torch.tensor([math.cos(a) for a in turned], dtype=torch.float64)
        torch.testing.assert_close(cos, exact, rtol=0, atol=2e-9)
        exact = torch.tensor([math.sin(a) for a in turned], dtype=torch.float64)
        torch.testing.assert_close(sin, exact, rtol=0, atol=2e-9)


def test_mrope_equals_hugging_face():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    sections = (2, 3, 3)
    config = Qwen2VLTextConfig(
        hidden_size=32,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    positions = torch.randint(50, (3, 2, 7))
    expected = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
    got = F.rotary_tables(F.rope_frequencies(16), positions, axes=F.mrope_axes(sections))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat((a, a), -1), b, rtol=0, atol=1e-5)


def test_interleaved_mrope_equals_hugging_face():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    sections = (24, 20, 20)
    config = Qwen3VLTextConfig(
        head_dim=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": list(sections),
        },
    )
    positions = torch.randint(50, (3, 2, 7))
    expected = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions)
    axes = F.mrope_axes(sections, interleaved=True)
    got = F.rotary_tables(F.rope_frequencies(128, base=5e6), positions, axes=axes)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat((a, a), -1), b, rtol=0, atol=1e-5)


def test_axial_tables_equal_hugging_face():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding

    config = Qwen3VLVisionConfig(hidden_size=64, num_heads=4)
    grid = F.grid_positions(3, 5)
    expected = Qwen3VLVisionRotaryEmbedding(config)(torch.zeros(1), grid.T)
    theta, axes = F.axial_frequencies(16)
    for a, b in zip(F.rotary_tables(theta, grid, axes=axes), expected, strict=True):
        torch.testing.assert_close(torch.cat((a, a), -1), b, rtol=0, atol=1e-5)


def test_text_tokens_turn_as_without_mrope():
    theta, p = F.rope_frequencies(16), torch.arange(5)
    got = F.rotary_tables(theta, p.expand(3, 5), axes=F.mrope_axes((2, 3, 3)))
    assert all(map(torch.equal, got, F.rotary_tables(theta, p)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_axial_scores_depend_on_the_offset_in_the_image_only(interleaved):
    theta, axes = F.axial_frequencies(8)
    grid = F.grid_positions(4, 5, prefix=1)
    cos, sin = F.rotary_tables(theta, grid, torch.float64, axes=axes)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()
    q, k = F.apply_rotary(
        q.expand(1, 21, 1, 8), k.expand(1, 21, 1, 8), cos, sin, interleaved=interleaved
    )
    scores = (q[0, 1:, 0] @ k[0, 1:, 0].T).view(4, 5, 4, 5)
    torch.testing.assert_close(scores[0, 1, 2, 4], scores[1, 0, 3, 3])
    assert abs(scores[0, 1, 2, 4] - scores[0, 1, 2, 3]) > 1e-4
    assert abs(scores[0, 1, 2, 4] - scores[0, 1, 3, 4]) > 1e-4
    assert torch.equal(q[0, 0], q[0, 1])  # neither the prefix nor patch (0, 0) turns


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference.LinearScaling(0.0), "LinearScaling: factor must be a finite number"),
        (lambda: reference.LinearScaling("2"), "factor must be a finite number > 0, got .*'2'"),
        (lambda: reference.LinearScaling(None), "factor must be a finite number"),
        (lambda: reference.NTKScaling(math.nan), "NTKScaling: factor must be a finite number"),
        (lambda: reference.DynamicNTKScaling(2.0, 0), "original_max_positions must be a finite"),
        (lambda: reference.YarnScaling(2.0, 8, attention_factor=math.nan), "attention_factor must"),
        (lambda: reference.YarnScaling(2.0, 8, mscale_all_dim=-1), "mscale_all_dim must be a fin"),
        (lambda: reference.YarnScaling(2.0, 8, truncate="no"), "truncate must be True or False"),
        (lambda: reference.Llama3Scaling(high_freq_factor=math.inf), "high_freq_factor must be"),
        (lambda: reference.LongRopeScaling(None, (1,), 2.0, 8), "short_factor must be a sequence"),
        (lambda: reference.LongRopeScaling((1,), ("a",), 2.0, 8), "long_factor must be a sequence"),
        (lambda: reference.LongRopeScaling((1,), (1,), 2.0, 1), "original_max_positions must be >"),
        (lambda: reference.Llama3Scaling(low_freq_factor=5.0), "low_freq_factor must be <="),
        (lambda: reference.LongRopeScaling((1, -1), (1, 1), 2.0, 8), "short_factor must be"),
        (
            lambda: F.rope_frequencies(
                6, scaling=reference.LongRopeScaling((1,), (1,), 2.0, 8), seq_len=3
            ),
            "short_factor must have one value per pair",
        ),
        (
            lambda: F.rope_frequencies(4, base=1.0, scaling=reference.YarnScaling(2.0, 8)),
            "base must be > 1",
        ),
        (
            lambda: reference.scaling_from_hf({"rope_type": "swirl"}, max_positions=8),
            "rope_type='swirl'",
        ),
        (
            lambda: F.rope_frequencies(4, scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type='dynamic' must have original_max_positions, got",
        ),
        (
            lambda: reference.scaling_from_hf({"rope_type": "linear"}, max_positions=8),
            "rope_type='linear' must have factor, got",
        ),
        (
            lambda: reference.scaling_from_hf(
                {"rope_type": "longrope", "factor": 2.0}, max_positions=8
            ),
            "must have long_factor, short_factor",
        ),
        (
            lambda: reference.scaling_from_hf(
                {"rope_type": "linear", "factor": 2, "beta": 1}, max_positions=8
            ),
            r"no parameters \['beta'\]",
        ),
        (lambda: F.axial_frequencies(6), "multiple of 2 \\* num_axes"),
        (lambda: F.mrope_axes((1, -2, 3)), "sections must be an int >= 0"),
        (lambda: F.mrope_axes((1, 2, 1), interleaved=True), "must not exceed the first"),
        (
            lambda: F.rotary_tables(torch.ones(2), torch.zeros(3, 4).int(), axes=(0, 3)),
            r"axes must have one entry in \[0, 3\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_scaling_without_a_hugging_face_type_says_so():
    with pytest.raises(NotImplementedError, match="NTKScaling"):
        reference.scaling_to_hf(reference.NTKScaling(2.0))


def test_scores_are_invariant_under_a_common_shift():
    """All scalings keep the relative property: one theta serves queries and keys."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind()
    for scaling in (reference.YarnScaling(4.0, 64), reference.Llama3Scaling(), None):
        theta = F.rope_frequencies(16, scaling=scaling)

        def score(m, n, theta=theta):
            tables = [F.rotary_tables(theta, torch.tensor([p]), torch.float64) for p in (m, n)]
            a, b = (F.apply_rotary(x, None, *t)[0] for x, t in zip((q, k), tables, strict=True))
            return float((a * b).sum())

        for shift in (1, 9999, 10**6):
            assert score(5 + shift, 2 + shift) == pytest.approx(score(5, 2), abs=1e-8)


def test_linear_scaling_is_a_change_of_position():
    theta = F.rope_frequencies(8, scaling=reference.LinearScaling(4.0))
    got = F.rotary_tables(theta, torch.arange(0, 40, 4))
    torch.testing.assert_close(got, F.rotary_tables(F.rope_frequencies(8), torch.arange(10)))


def test_half_split_is_a_permutation_of_interleaved():
    dim, x = 10, torch.randn(1, 7, 2, 10)
    cos, sin = F.rotary_tables(F.rope_frequencies(dim), torch.arange(7))
    perm = list(itertools.chain(range(0, dim, 2), range(1, dim, 2)))
    half, _ = F.apply_rotary(x[..., perm], None, cos, sin)
    pairs, _ = F.apply_rotary(x, None, cos, sin, interleaved=True)
    torch.testing.assert_close(half, pairs[..., perm])
