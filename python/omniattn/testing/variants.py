"""Which functions, modules and the like give each published attention, position, norm and MLP.

The op table lists kernels; many published variants are tables or compositions over one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIANTS", "Variant"]


@dataclass(frozen=True)
class Variant:
    """A published form; names are public in functional, its masks or scores, modules, reference."""

    form: str
    names: tuple[str, ...]
    paper: str


VARIANTS = (
    Variant(
        "multi-head, multi-query and grouped-query attention, self and cross",
        ("attention", "Attention", "MultiheadAttention"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "packed and padded sequences",
        ("attention_varlen", "Documents", "KeyPadding", "KeyLengths"),
        "Dao 2023, arXiv 2307.08691",
    ),
    Variant(
        "causal, prefix-LM and chunked masks",
        ("Causal", "PrefixLM", "Chunked"),
        "Raffel et al. 2019, arXiv 1910.10683",
    ),
    Variant(
        "sliding windows, neighbourhoods",
        ("SlidingWindow", "sliding_window", "Neighbourhood"),
        "Hassani et al. 2022, arXiv 2204.07143",
    ),
    Variant(
        "dilated, strided, fixed and every k-th key",
        ("Dilated", "Strided", "Fixed", "EveryKth"),
        "Child et al. 2019, arXiv 1904.10509",
    ),
    Variant("any mask, in blocks", ("from_predicate", "Blocks"), "this package"),
    Variant("split keys, merged by lse", ("merge_attention",), "Dao et al. 2022, arXiv 2205.14135"),
    Variant(
        "caches: contiguous, rolling, paged, of a source",
        ("attention_cached", "KVCache", "RollingCache", "PagedCache", "CrossCache"),
        "Kwon et al. 2023, arXiv 2309.06180",
    ),
    Variant(
        "multi-head latent attention, absorbed decoding",
        ("MultiHeadLatentAttention", "LatentCache"),
        "DeepSeek-AI 2024, arXiv 2405.04434",
    ),
    Variant("QK-norm: rms, layer, l2", ("Attention",), "Henry et al. 2020, arXiv 2010.04245"),
    Variant(
        "softcap, sinks, scale per head",
        ("attention", "Attention"),
        "OpenAI 2025, arXiv 2508.10925",
    ),
    Variant("gated attention", ("Attention",), "Qiu et al. 2025, arXiv 2505.06708"),
    Variant("gated attention unit", ("GatedAttentionUnit",), "Hua et al. 2022, arXiv 2202.10447"),
    Variant(
        "differential attention", ("DifferentialAttention",), "Ye et al. 2024, arXiv 2410.05258"
    ),
    Variant(
        "sigmoid and squared ReLU attention",
        ("attention",),
        "Ramapuram et al. 2024, arXiv 2409.04431",
    ),
    Variant("selection of one key", ("select_attention",), "this package"),
    Variant(
        "T5 relative bias", ("T5Bias", "T5RelativeBias"), "Raffel et al. 2019, arXiv 1910.10683"
    ),
    Variant("Transformer-XL", ("TransformerXLAttention",), "Dai et al. 2019, arXiv 1901.02860"),
    Variant("DeBERTa", ("DisentangledAttention",), "He et al. 2020, arXiv 2006.03654"),
    Variant(
        "Swin: windows, shifted windows, patch merging",
        ("WindowBias", "WindowAttention", "SwinBlock", "PatchMerging"),
        "Liu et al. 2021, arXiv 2103.14030",
    ),
    Variant(
        "PVT: spatial reduction",
        ("SpatialReductionAttention",),
        "Wang et al. 2021, arXiv 2102.12122",
    ),
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
    Variant(
        "dropout, the same bits on every device",
        ("dropout", "Dropout"),
        "Srivastava et al. 2014, JMLR 15",
    ),
    Variant(
        "mixture of experts, dropless or with capacity, on one or several processes",
        ("moe_experts", "drop_over_capacity", "MoE", "ExpertParallel"),
        "Shazeer et al. 2017, arXiv 1701.06538",
    ),
    Variant(
        "routers: softmax and top-k in either order, Switch, group-limited",
        ("softmax_top_k", "top_k_softmax"),
        "Fedus et al. 2021, arXiv 2101.03961",
    ),
    Variant(
        "router: sigmoid, balanced by a bias",
        ("sigmoid_top_k", "update_router_bias"),
        "DeepSeek-AI 2024, arXiv 2412.19437",
    ),
    Variant("router: sigmoid on the inputs", ("llama4_top_k",), "Meta AI 2025, Llama 4"),
    Variant(
        "router: noisy top-k",
        ("noisy_top_k", "expert_importance", "cv_squared"),
        "Shazeer et al. 2017, arXiv 1701.06538",
    ),
    Variant("router: expert choice", ("expert_choice",), "Zhou et al. 2022, arXiv 2202.09368"),
    Variant(
        "router gradients: exact, straight-through, dense, default vectors",
        ("softmax_top_k", "default_vector_gradient", "update_default_vectors"),
        "Panda et al. 2025, arXiv 2504.12463",
    ),
    Variant(
        "balance and z-losses of routers",
        ("load_balance_loss", "router_z_loss"),
        "Zoph et al. 2022, arXiv 2202.08906",
    ),
    Variant(
        "multi-token prediction", ("MultiTokenPredictor",), "DeepSeek-AI 2024, arXiv 2412.19437"
    ),
)
