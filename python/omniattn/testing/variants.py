"""Which functions, modules and scalings give each positional encoding, norm and feed-forward layer.

The op table lists kernels; many published variants are tables or compositions over one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIANTS", "Variant"]


@dataclass(frozen=True)
class Variant:
    """A published form: names are public in omniattn.functional, .modules or .reference."""

    form: str
    names: tuple[str, ...]
    paper: str


VARIANTS = (
    Variant(
        "sinusoidal positions",
        ("sinusoidal", "SinusoidalPositional"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "learned positions, resized in 1-D and 2-D",
        ("interpolate_positions", "interpolate_grid", "LearnedPositional"),
        "Dosovitskiy et al. 2020, arXiv 2010.11929",
    ),
    Variant(
        "RoPE: half-split, interleaved, partial",
        ("apply_rotary", "RotaryEmbedding"),
        "Su et al. 2021, arXiv 2104.09864",
    ),
    Variant(
        "RoPE, linear scaling",
        ("rope_frequencies", "LinearScaling"),
        "Chen et al. 2023, arXiv 2306.15595",
    ),
    Variant(
        "RoPE, NTK and dynamic NTK",
        ("rope_frequencies", "NTKScaling", "DynamicNTKScaling"),
        "Peng et al. 2023, arXiv 2309.00071",
    ),
    Variant(
        "RoPE, YaRN", ("rope_frequencies", "YarnScaling"), "Peng et al. 2023, arXiv 2309.00071"
    ),
    Variant(
        "RoPE, Llama 3 scaling",
        ("rope_frequencies", "Llama3Scaling"),
        "Llama Team 2024, arXiv 2407.21783",
    ),
    Variant(
        "RoPE, LongRoPE",
        ("rope_frequencies", "LongRopeScaling"),
        "Ding et al. 2024, arXiv 2402.13753",
    ),
    Variant(
        "M-RoPE, sections and interleaved",
        ("rotary_tables", "mrope_axes", "RotaryEmbedding"),
        "Wang et al. 2024, arXiv 2409.12191",
    ),
    Variant(
        "2-D RoPE",
        ("axial_frequencies", "grid_positions", "RotaryEmbedding"),
        "Fang et al. 2023, arXiv 2303.11331",
    ),
    Variant(
        "ALiBi", ("alibi_slopes", "alibi_bias", "ALiBi"), "Press et al. 2021, arXiv 2108.12409"
    ),
    Variant(
        "2-D sin-cos positions",
        ("sincos_2d", "SinCosPositional2d"),
        "He et al. 2021, arXiv 2111.06377",
    ),
    Variant(
        "packed and padded position ids", ("packed_positions", "masked_positions"), "this package"
    ),
    Variant("LayerNorm", ("layer_norm", "LayerNorm"), "Ba et al. 2016, arXiv 1607.06450"),
    Variant("RMSNorm", ("rms_norm", "RMSNorm"), "Zhang and Sennrich 2019, arXiv 1910.07467"),
    Variant(
        "gated RMSNorm, before or after the gate",
        ("rms_norm_gated", "RMSNormGated"),
        "Dao and Gu 2024, arXiv 2405.21060",
    ),
    Variant("QK-norm fused with RoPE", ("qk_norm_rotary",), "Henry et al. 2020, arXiv 2010.04245"),
    Variant("norm per head", ("group_norm", "GroupNorm"), "Wu and He 2018, arXiv 1803.08494"),
    Variant(
        "pre-, post-, sandwich and parallel placement",
        ("Residual", "ParallelResidual", "DropPath"),
        "Xiong et al. 2020, arXiv 2002.04745",
    ),
    Variant(
        "feed-forward: ReLU, GELU, SiLU, squared ReLU",
        ("mlp", "MLP"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "GLU family as one op",
        ("glu_mlp", "swiglu", "geglu", "reglu", "glu", "bilinear", "GatedMLP"),
        "Shazeer 2020, arXiv 2002.05202",
    ),
)
