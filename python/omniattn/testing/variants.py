"""Published forms that belong to no family of ops; the others are in `specs`."""

from __future__ import annotations

from omniattn.testing.spec import Variant

__all__ = ["VARIANTS"]

VARIANTS = (
    Variant(
        "multi-head latent attention with absorbed decoding",
        ("MultiHeadLatentAttention", "LatentCache"),
        "DeepSeek-AI 2024, arXiv 2405.04434",
    ),
    Variant(
        "DeepSeek Sparse Attention: keys selected by an indexer distilled from attention",
        ("DeepSeekSparseAttention", "DSAState"),
        "DeepSeek-AI 2025, arXiv 2512.02556",
    ),
    Variant(
        "compressed sparse and heavily compressed attention (CSA, HCA)",
        ("CompressedSparseAttention", "CSAState"),
        "DeepSeek-AI 2026, DeepSeek-V4",
    ),
    Variant(
        "QK-norm: RMSNorm, RMSNorm with 1 + w, LayerNorm, L2",
        ("Attention",),
        "Henry et al. 2020, arXiv 2010.04245",
    ),
    Variant("gated attention", ("Attention",), "Qiu et al. 2025, arXiv 2505.06708"),
    Variant(
        "scalable softmax (SSMax): scores times s log n",
        ("Attention",),
        "Nakanishi 2025, arXiv 2501.19399",
    ),
    Variant(
        "multi-matrix factorization attention (MFA)",
        ("Attention",),
        "Hu et al. 2024, arXiv 2412.19255",
    ),
    Variant(
        "tensor product attention (TPA): factors as cache",
        ("Attention",),
        "Zhang et al. 2025, arXiv 2501.06425",
    ),
    Variant(
        "hashed embeddings of n-grams (Engram)",
        ("ngram_hashes", "Engram", "DecoderBlock"),
        "DeepSeek-AI 2026, arXiv 2601.07372",
    ),
    Variant(
        "multi-head low-rank attention (MLRA): a latent for each group of heads",
        ("MultiHeadLatentAttention",),
        "Liu et al. 2026, arXiv 2603.02188",
    ),
    Variant("value residuals (ResFormer)", ("Attention",), "Zhou et al. 2024, arXiv 2410.17897"),
    Variant(
        "keys and values of one layer for later ones (YOCO, cross-layer attention)",
        ("Attention",),
        "Sun et al. 2024, arXiv 2405.05254",
    ),
    Variant("gated attention unit", ("GatedAttentionUnit",), "Hua et al. 2022, arXiv 2202.10447"),
    Variant(
        "differential attention", ("DifferentialAttention",), "Ye et al. 2024, arXiv 2410.05258"
    ),
    Variant(
        "Transformer-XL, per-layer or shared u and v",
        ("TransformerXLAttention",),
        "Dai et al. 2019, arXiv 1901.02860",
    ),
    Variant(
        "disentangled attention (DeBERTa)",
        ("DisentangledAttention",),
        "He et al. 2020, arXiv 2006.03654",
    ),
    Variant(
        "spatial-reduction attention (PVT)",
        ("SpatialReductionAttention",),
        "Wang et al. 2021, arXiv 2102.12122",
    ),
    Variant(
        "sinusoidal positions",
        ("sinusoidal", "SinusoidalPositional"),
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    Variant(
        "learned positions, 1-D and 2-D interpolation",
        ("interpolate_positions", "interpolate_grid", "LearnedPositional"),
        "Dosovitskiy et al. 2020, arXiv 2010.11929",
    ),
    Variant(
        "2-D sin-cos positions",
        ("sincos_2d", "SinCosPositional2d"),
        "He et al. 2021, arXiv 2111.06377",
    ),
    Variant(
        "position ids of packed and padded sequences",
        ("packed_positions", "masked_positions"),
        "this package",
    ),
    Variant(
        "pre-, post-, sandwich and parallel norm placement",
        ("Residual", "ParallelResidual", "DropPath", "LayerScale"),
        "Xiong et al. 2020, arXiv 2002.04745",
    ),
    Variant(
        "dynamic tanh in place of norms (DyT)",
        ("DynamicTanh",),
        "Zhu et al. 2025, arXiv 2503.10622",
    ),
    Variant(
        "learned activations: xIELU, PolyNorm",
        ("XIELU", "PolyNorm", "MLP"),
        "Huang and Schlag 2024, arXiv 2411.13010",
    ),
    Variant(
        "hyper-connections",
        ("HyperConnections", "DecoderBlock"),
        "Zhu et al. 2024, arXiv 2409.19606",
    ),
    Variant(
        "manifold-constrained hyper-connections (mHC)",
        ("ManifoldHyperConnections", "DecoderBlock"),
        "Xie et al. 2025, arXiv 2512.24880",
    ),
    Variant(
        "attention residuals over depth, of layers or blocks (AttnRes)",
        ("AttentionResiduals", "DecoderBlock"),
        "Kimi Team 2026, arXiv 2603.15031",
    ),
    Variant(
        "linear layers of ternary weights and 8-bit inputs (BitNet b1.58)",
        ("bit_linear", "BitLinear"),
        "Ma et al. 2024, arXiv 2402.17764",
    ),
    Variant(
        "Canon layers: short convolutions with a residual at four places of a block",
        ("DecoderBlock", "ShortConvolution"),
        "Allen-Zhu 2025, SSRN 5240330",
    ),
    Variant(
        "Mamba-attention hybrids: periodic (Jamba), alternating (Samba)",
        ("Mamba", "Attention", "DecoderBlock"),
        "Lieber et al. 2024, arXiv 2403.19887",
    ),
    Variant(
        "multi-token prediction", ("MultiTokenPredictor",), "DeepSeek-AI 2024, arXiv 2412.19437"
    ),
)
