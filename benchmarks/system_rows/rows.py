"""Rows of all published forms in docs/variants.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as torch_F
from baselines.attention import sdpa_attention
from torch import Tensor

from omniattn import functional as F
from omniattn import modules as m
from omniattn.functional.scores import T5Bias
from system_rows.losses import LOSSES
from system_rows.positions import POSITIONS
from system_rows.routers import ROUTERS
from system_rows.states import STATES
from system_rows.system import Plain, Provider, System, functions, layer, normal

#: Form that is a case of an op -> the op and the label of its benchmark.
OF_OPS: dict[str, tuple[tuple[str, str], ...]] = {
    "multi-head, multi-query and grouped-query attention, self and cross": (
        *(("attention", "full"), ("attention", "multiquery"), ("attention", "grouped")),
        ("attention", "cross"),
    ),
    "causal, prefix-LM and chunked masks": (
        *(("attention", "causal"), ("attention", "prefix"), ("attention", "chunked")),
    ),
    "relative position embeddings of keys and queries": (("attention", "distances"),),
    "sliding-window and neighborhood attention": (
        ("attention", "window"),
        ("attention", "neighbours"),
    ),
    "dilated, strided, fixed and every-k-th-key patterns": (
        *(("attention", "dilated"), ("attention", "strided"), ("attention", "fixed")),
        ("attention", "everykth"),
    ),
    "block-sparse attention: mask or compressed rows, any block size": (("attention", "blocks"),),
    "neighborhood attention in 1-D to 3-D: dilated, strided, causal": (
        *(("na1d", "window"), ("na2d", "nat"), ("na2d", "dinat"), ("na3d", "video")),
    ),
    "block-local attention with global tokens": (("attention", "blockslocalglobal"),),
    "attention to selected key blocks or keys": (
        *(("selected_attention", "nsa"), ("selected_attention", "tokens")),
    ),
    "native sparse attention (NSA): compression, selection, sliding window": (
        ("nsa_attention", "causal"),
    ),
    "mixture of block attention (MoBA)": (("moba_attention", "causal"),),
    "lightning indexer of DeepSeek Sparse Attention, with its loss": (
        *(("dsa_indexer", "heads64"), ("dsa_indexer", "step")),
        *(("dsa_indexer_loss", "dense"), ("dsa_indexer_loss", "sparse")),
    ),
    "single-head indexer without weights, ties to the latest key": (("dsa_indexer", "onehead"),),
    "QSA of Qwen4: windows selected by their mean keys, and the tokens after the last window": (
        ("dsa_indexer", "windows"),
    ),
    "learned block routing: untrained, trained by gates or distillation": (
        *(("routed_block_attention", "plain"), ("routed_block_attention", "gate")),
    ),
    "Longformer: dilated windows per head, global tokens with separate projections": (
        *(("longformer_attention", "window"), ("longformer_attention", "global")),
    ),
    "BigBird: random, window and global blocks, global tokens": (("bigbird_attention", "blocks"),),
    "hub-and-spoke attention, shared or separate projections": (
        *(("hub_spoke_attention", "hubs"), ("hub_spoke_attention", "disjoint")),
    ),
    "deterministic sparse attention: window, representatives, pyramids": (
        *(("detsa_attention", "tokens"), ("detsa_attention", "means")),
    ),
    "dual chunk attention": (("dual_chunk_attention", "chunks"),),
    "gated combination of local and strided attention": (("local_strided_attention", "two"),),
    "block-sparse masks from a predicate": (("attention", "predicate"),),
    "logit softcapping, attention sinks, per-head scale": (
        *(("attention", "softcap"), ("attention", "sinks"), ("attention", "headscale")),
    ),
    "sigmoid and squared ReLU attention": (("attention", "sigmoid"), ("attention", "relu2")),
    "hard attention: one selected key per query": (("select_attention", "causal"),),
    "selective attention": (("selective_attention", "model"),),
    "forgetting attention (FoX): gates between key and query": (("forgetting_attention", "model"),),
    "PaTH attention: products of reflections between key and query": (("path_attention", "model"),),
    "wall attention: decays of channels between key and query": (("wall_attention", "model"),),
    "stick-breaking attention": (("stick_breaking_attention", "model"),),
    "softpick attention": (("softpick_attention", "model"),),
    "multi-token attention: logits convolved over queries and keys, heads mixed": (
        ("multi_token_attention", "model"),
    ),
    "Parallax: attention minus a covariance times a second query": (
        ("parallax_attention", "model"),
    ),
    "sparsemax and entmax attention": (("sparsemax_attention", "model"),),
    "ALiBi": (("attention", "alibi"),),
    "feed-forward layers: ReLU, GELU, SiLU, squared ReLU": (
        *(("mlp", "gelu"), ("mlp", "relu"), ("mlp", "silu"), ("mlp", "relu2")),
    ),
    "gated feed-forward layers (GLU family), fused": (("glu_mlp", "swiglu"), ("glu_mlp", "geglu")),
    "clamped SwiGLU (gpt-oss)": (("clamped_swiglu", "pair"),),
    "cross entropy: label smoothing, class weights, z-loss, softcap, temperature": (
        *(("cross_entropy", "plain"), ("cross_entropy", "weighted"), ("cross_entropy", "zloss")),
        ("linear_cross_entropy", "plain"),
    ),
    "distillation: forward and reverse KL, generalised Jensen-Shannon divergence": (
        *(("jsd", "plain"), ("jsd", "forward"), ("linear_jsd", "plain")),
    ),
    "mixture of experts: dropless or with capacity, expert parallelism": (
        ("moe_experts", "mixtral"),
    ),
    "linear attention with any feature map": (("linear_attention", "head64"),),
    "random features: FAVOR+ (positive, hyperbolic, orthogonal), trigonometric, unnormalised": (
        ("random_feature_attention", "head64"),
    ),
    "linear attention with decay: retention, GLA": (
        *(("gated_linear_attention", "head64"), ("retention", "head64")),
    ),
    "delta rules: DeltaNet, Gated DeltaNet, Kimi Delta Attention": (
        *(
            ("delta_rule", "head64"),
            ("gated_delta_rule", "head64"),
            ("kimi_delta_attention", "head64"),
        ),
    ),
    "gated delta product: several updates for each token": (("gated_delta_product", "head64"),),
    "gated Oja rule: keys are corrected by what their values read": (("gated_oja_rule", "head64"),),
    "Comba: another key erases": (("comba", "head64"),),
    "Gated DeltaNet-2: gates of erased and written channels": (("gated_delta_rule_2", "head64"),),
    "gated slot attention: softmax over slots that decay": (("gated_slot_attention", "head64"),),
    "CyFA: slots of relative time, through which tokens flow with a learned clock": (
        ("cyclic_flow_attention", "head64"),
    ),
    "LightNet: keys are a softmax over the tokens so far": (("lightnet_attention", "head64"),),
    "ABC: softmax over slots of weighted means": (("abc_attention", "head64"),),
    "preconditioned Gated DeltaNet and KDA: writes scaled by mean squares of keys": (
        ("preconditioned_delta_rule", "head64"),
    ),
    "MesaNet: least squares over past tokens by conjugate gradients": (("mesa_net", "head64"),),
    "Gated KalmaNet: ridge regression on past tokens, relative to the norm of their keys": (
        ("gated_kalmanet", "head64"),
    ),
    "TTT-Linear: a linear model that descends the loss of each mini-batch": (
        ("ttt_linear", "head64"),
    ),
    "Titans: a linear memory that learns by descent with momentum and forgetting": (
        ("titans_linear", "head64"),
    ),
    "Titans: an MLP as memory, learned by descent with momentum and forgetting": (
        ("titans_mlp", "head32"),
    ),
    "ATLAS: a linear memory that learns from windows of tokens, its steps orthogonal or not": (
        ("atlas_linear", "head64"),
        ("atlas_linear", "muon"),
    ),
    "HGRN: forget gates of channels": (("linear_scan", "model"),),
    "DeltaFormer: values less what attention to earlier ones reads": (
        ("deltaformer_attention", "head64"),
    ),
    "log-linear attention: a state for each power of two of past tokens": (
        ("log_linear_attention", "head64"),
    ),
    "RWKV-4 to 7": (("rwkv4", "model"), ("rwkv6", "head64"), ("rwkv7", "head64")),
    "RWKV weighted means with exponent r . k: quadratic, recurrent": (
        *(("rwkv_quadratic", "head64"), ("rwkv_recurrent", "head64")),
    ),
    "causal depthwise convolution with SiLU": (
        *(("causal_conv1d", "mamba"), ("causal_conv1d", "decode")),
    ),
    "state-space duality: Mamba-2": (("ssd", "state64"), ("ssd", "state128")),
    "Mamba": (("selective_scan", "model"),),
    "Longhorn: decays of a regression's solution": (("longhorn_scan", "model"),),
    "Mamba-3: trapezoidal steps, rotating states, several inputs": (("mamba3", "shared"),),
    "xLSTM": (("mlstm", "model"), ("slstm", "model")),
    "LayerNorm": (("layer_norm", "plain"),),
    "RMSNorm": (("rms_norm", "plain"),),
    "gated RMSNorm, norm before or after the gate": (
        ("rms_norm_gated", "after"),
        ("rms_norm_gated", "before"),
    ),
    "GroupNorm, per-head norm": (("group_norm", "heads"),),
    "dropout, bitwise equal on every device": (("dropout", "tenth"), ("attention", "dropout")),
    "RoPE: half-split, interleaved, partial": (
        *(("apply_rotary", "half"), ("apply_rotary", "interleaved"), ("apply_rotary", "partial")),
    ),
    "QK-norm fused with RoPE": (("qk_norm_rotary", "half"),),
    "packed and padded sequences": (("attention_varlen", "mixed"), ("attention", "padding")),
    "KV caches: contiguous, rolling, paged, cross-attention": (
        *(("attention_cached", "decode"), ("attention_cached", "pages")),
    ),
    "KV caches in int8, with a factor for each token and head": (
        *(("attention_int8", "decode"), ("attention_int8", "pages")),
    ),
}


def _merged() -> dict[str, Provider]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        halves = (
            F.attention(q, keys, values, return_lse=True)
            for keys, values in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True)
        )
        return F.merge_attention(*zip(*halves, strict=True))[0]

    return functions(
        [normal(1, 512, 8, 64, seed=n) for n in range(3)], ours=ours, aten=sdpa_attention
    )


def _t5() -> dict[str, Provider]:
    *leaves, table = [normal(1, 512, 8, 64, seed=n) for n in range(3)] + [normal(32, 8)]

    def ours(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.attention(q, k, v, scale=1.0, relative=T5Bias(table))

    def hf(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        at = torch.arange(512)
        bias = T5Bias(table).term(at[:, None], at, table.dtype)
        return sdpa_attention(q, k, v, scale=1.0, bias=bias)

    return functions([*leaves, table], ours=ours, hf=hf)


def _rotated(config: Any, size: int) -> dict[str, Provider]:
    cos, sin = F.rotary_tables(F.rope_frequencies(size), torch.arange(512))
    return layer(config, normal(1, 512, 512), call=lambda module, x: module(x, rope=(cos, sin)))


def _engram() -> dict[str, Provider]:
    config = m.Engram.Config(512, 4096, (20000, 20000))
    tokens = torch.arange(512)[None] * 7 % 4096
    return layer(config, normal(1, 512, 512), call=lambda module, x: module(x, tokens)[0])


def _mla(**options: Any) -> dict[str, Provider]:
    return _rotated(m.MultiHeadLatentAttention.Config(512, 8, 256, 128, 64, 32, 64, **options), 32)


def _dsa() -> dict[str, Provider]:
    """DSA with 256 of 1024 tokens selected, and the indexer's loss."""
    sizes = (512, 8, None, 128, 64, 32, 64)
    config = m.DeepSeekSparseAttention.Config(*sizes, index_heads=4, index_dim=64, index_topk=256)
    cos, sin = F.rotary_tables(F.rope_frequencies(32), torch.arange(1024))
    return layer(config, normal(1, 1024, 512), call=lambda module, x: module(x, rope=(cos, sin)))


def _csa(**options: Any) -> dict[str, Provider]:
    """Attention of DeepSeek-V4 to a window of 128 tokens and to compressed keys of 1024."""
    config = m.CompressedSparseAttention.Config(512, 8, 64, 256, 32, 4, 128, **options)
    cos, sin = F.rotary_tables(F.rope_frequencies(32), torch.arange(1024))
    x = normal(1, 1024, 512)
    return layer(config, x, call=lambda module, x: module(x, rope=(cos, sin)), merges=True)


def _mla_decode() -> dict[str, Provider]:
    """Absorbed MLA decoding of a token with a cache of 1024."""
    config = m.MultiHeadLatentAttention.Config(512, 8, 256, 128, 64, 32, 64)
    tables = F.rotary_tables(F.rope_frequencies(32), torch.arange(1025))
    x = torch.randn(1, 1025, 512, generator=torch.Generator().manual_seed(0))

    def call(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not hasattr(module, "_filled"):
                module._filled = module.new_state(1, 1025)
                module(x[:, :1024], state=module._filled, rope=tuple(t[:1024] for t in tables))
            module._filled.crop(1024)
            out: Tensor = module(
                x[:, 1024:], state=module._filled, rope=tuple(t[1024:] for t in tables)
            )
            return out

    return layer(config, x, call=call)


def _eviction(policy: m.Eviction) -> dict[str, Provider]:
    """A prompt of 512 and 8 more tokens; not "aten", which has no lse to weight tokens."""
    x = torch.randn(1, 520, 512, generator=torch.Generator().manual_seed(0))

    def call(module: m.Attention) -> Tensor:
        state = module.new_state(1, 520, eviction=policy)
        with torch.no_grad():
            parts = [module(t, state=state) for t in x.split((512, *(1,) * 8), 1)]
        return torch.cat(parts, 1)

    providers: dict[str, Provider] = {}
    for name, backend in (("ours", None), ("eager", "reference")):
        torch.manual_seed(0)
        module = m.Attention.Config(512, 8, 2, backend=backend).build()
        providers[name] = (lambda module=module: call(module), [])
    return providers


def _block(placement: str) -> dict[str, Provider]:
    norm = m.LayerNorm.Config(512)
    config = m.Residual.Config(norm, placement)

    def build(backend: str | None) -> Any:
        torch.manual_seed(0)
        return m.Residual(Plain(512, backend), config.with_backend(backend))

    x, ours, theirs = normal(1, 512, 512), build(None), build("reference")
    return {
        "ours": (lambda: ours(x), [x, *ours.parameters()]),
        "aten": (lambda: theirs(x), [x, *theirs.parameters()]),
    }


def _mtp() -> dict[str, Provider]:
    x, weight = normal(1, 256, 256), normal(1000, 256)
    tokens = torch.randint(1000, (1, 256), generator=torch.Generator().manual_seed(0))
    providers: dict[str, Provider] = {}
    for name, backend in (("ours", None), ("aten", "reference")):
        torch.manual_seed(0)
        config = m.MultiTokenPredictor.Config(256, 2, backend=backend)
        module = m.MultiTokenPredictor(config, lambda b=backend: Plain(256, b))

        def call(module: Any = module) -> Any:
            return module(x, tokens, lambda t: torch_F.embedding(t, weight), lambda h: h @ weight.T)

        providers[name] = (call, [x, weight, *module.parameters()])
    return providers


def _attention(**options: Any) -> Callable[[], dict[str, Provider]]:
    return lambda: layer(m.Attention.Config(512, 8, **options), normal(1, 512, 512))


def _sharing(**options: Any) -> dict[str, Provider]:
    config = m.Attention.Config(512, 8, **options)
    return layer(config, normal(1, 512, 512), call=lambda module, x: module(x, shared={}))


def _streams(form: Any) -> dict[str, Provider]:
    def call(module: Any, h: Tensor) -> Tensor:
        x, found = module.read(h)
        written: Tensor = module.write(h, x, found)
        return written

    return layer(form.Config(512), normal(1, 512, 4 * 512), call=call)


def _dynamic_conv() -> dict[str, Provider]:
    x, taps = normal(1, 1024, 1024), normal(1, 1024, 16, 4)

    def plain() -> Tensor:
        windows = torch_F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).unflatten(2, (16, 64))
        return torch.einsum("bthdk,bthk->bthd", windows, taps).flatten(2)

    return {
        "ours": (lambda: F.dynamic_conv1d(x, taps), [x, taps]),
        "aten": (plain, [x, taps]),
    }


def _canon() -> dict[str, Provider]:
    mixer, mlp = m.Attention.Config(512, 8), m.GatedMLP.Config(512, 1024)
    config = m.DecoderBlock.Config(mixer, mlp, m.RMSNorm.Config(512), canon="ABCD")
    return layer(config, normal(1, 512, 512), call=lambda module, x: sum(module(x)))


def _learned(activation: m.LayerConfig) -> dict[str, Provider]:
    return layer(m.MLP.Config(512, 1024, learned=activation), normal(1, 512, 512))


def _swin() -> dict[str, Provider]:
    return layer(m.WindowAttention.Config(192, 6, 7, 3), normal(2, 28, 28, 192))


def _deberta() -> dict[str, Provider]:
    config = m.DisentangledAttention.Config(512, 8, max_distance=512, buckets=256)
    return layer(config, normal(1, 512, 512), normal(512, 512))


SYSTEMS: dict[str, tuple[System, ...]] = {
    "split-KV attention, merged by log-sum-exp": (System("merge-B1T512H8D64", _merged),),
    "T5 relative bias": (System("t5-B1T512H8D64", _t5),),
    "Swin Transformer: shifted windows, patch merging": (
        System("swin-B2S28C192H6", _swin),
        System(
            "merging-B2S28C192",
            lambda: layer(m.PatchMerging.Config(192), normal(2, 28, 28, 192)),
        ),
    ),
    "multi-head latent attention with absorbed decoding": (
        System("mla-B1T512C512H8", _mla),
        System("mladecode-B1T1024C512H8", _mla_decode),
        System("mlashared-B1T512C512H8", lambda: _mla(share_up=True)),
        System("mlafused-B1T512C512H8", lambda: _mla(latent_norm=False, fuse_up=True)),
    ),
    "DeepSeek Sparse Attention: keys selected by an indexer distilled from attention": (
        System("dsa-B1T1024C512H8", _dsa),
    ),
    "compressed sparse and heavily compressed attention (CSA, HCA)": (
        System(
            "csa-B1T1024C512H8",
            lambda: _csa(index_topk=64, index_heads=4, index_dim=64),
        ),
        System("hca-B1T1024C512H8", lambda: _csa(compress_rate=32, overlap=False, index_topk=None)),
    ),
    "KV cache eviction: threshold, H2O, StreamingLLM, SnapKV": tuple(
        System(f"{name}-B1T512C512H8", lambda policy=policy: _eviction(policy))
        for name, policy in (
            ("threshold", m.Threshold(eps=2e-3)),
            ("h2o", m.H2O(64, 64)),
            ("streaming", m.Streaming(4, 124)),
            ("snapkv", m.SnapKV(128)),
        )
    ),
    "QK-norm: RMSNorm, RMSNorm with 1 + w, LayerNorm, L2": tuple(
        System(f"qknorm{name}-B1T512C512H8", _attention(qk_norm=name))
        for name in ("rms", "layer", "l2")
    ),
    "gated attention": (System("gate-B1T512C512H8", _attention(gate="elementwise")),),
    "scalable softmax (SSMax): scores times s log n": (
        System("ssmax-B1T512C512H8", _attention(log_scale=True)),
    ),
    "multi-matrix factorization attention (MFA)": (
        System("mfa-B1T512C512H8", _attention(num_kv_heads=1, head_dim=128, q_rank=256)),
    ),
    "tensor product attention (TPA): factors as cache": (
        System("tpa-B1T512C512H8", _attention(ranks=(6, 2, 2))),
    ),
    "multi-head low-rank attention (MLRA): a latent for each group of heads": (
        System(
            "mlra-B1T512C512H8",
            lambda: _mla(num_latents=4, num_branches=4, latent_scale=True),
        ),
    ),
    "hashed embeddings of n-grams (Engram)": (System("engram-B1T512C512", _engram),),
    "value residuals (ResFormer)": (
        System("resformer-B1T512C512H8", lambda: _sharing(value_residual="first")),
    ),
    "keys and values of one layer for later ones (YOCO, cross-layer attention)": (
        System("yoco-B1T512C512H8", lambda: _sharing(shared_kv="source")),
    ),
    "gated attention unit": (
        System(
            "gau-B1T512C512", lambda: layer(m.GatedAttentionUnit.Config(512), normal(1, 512, 512))
        ),
    ),
    "differential attention": (
        System(
            "differential-B1T512C512H4",
            lambda: _rotated(m.DifferentialAttention.Config(512, 4, 1), 64),
        ),
    ),
    "Transformer-XL, per-layer or shared u and v": (
        System(
            "xl-B1T512C512H8",
            lambda: layer(m.TransformerXLAttention.Config(512, 8), normal(1, 512, 512)),
        ),
    ),
    "disentangled attention (DeBERTa)": (System("deberta-B1T512C512H8", _deberta),),
    "spatial-reduction attention (PVT)": (
        System(
            "pvt-B1S32C256H4",
            lambda: layer(m.SpatialReductionAttention.Config(256, 4, 4), normal(1, 32, 32, 256)),
        ),
    ),
    "pre-, post-, sandwich and parallel norm placement": tuple(
        System(f"{name}-T512C512", lambda name=name: _block(name))
        for name in ("pre", "post", "sandwich")
    ),
    "dynamic tanh in place of norms (DyT)": (
        System("dyt-T512C512", lambda: layer(m.DynamicTanh.Config(512), normal(1, 512, 512))),
    ),
    "learned activations: xIELU, PolyNorm": tuple(
        System(f"{name}-T512C512", lambda learned=learned: _learned(learned))
        for name, learned in (("xielu", m.XIELU.Config()), ("polynorm", m.PolyNorm.Config()))
    ),
    "hyper-connections": (System("hyper-B1T512C512", lambda: _streams(m.HyperConnections)),),
    "manifold-constrained hyper-connections (mHC)": (
        System("mhc-B1T512C512", lambda: _streams(m.ManifoldHyperConnections)),
    ),
    "attention residuals over depth, of layers or blocks (AttnRes)": (
        System("attnres-B1T512C512", lambda: _streams(m.AttentionResiduals)),
    ),
    "dynamic convolution: causal filters of each token": (
        System("dynamicconv-B1T1024C1024H16", _dynamic_conv),
    ),
    "linear layers of ternary weights and 8-bit inputs (BitNet b1.58)": (
        System(
            "bitlinear-M512K1024N1024",
            lambda: layer(m.BitLinear.Config(1024, 1024), normal(512, 1024)),
        ),
    ),
    "Canon layers: short convolutions with a residual at four places of a block": (
        System("canon-B1T512C512H8", _canon),
    ),
    "multi-token prediction": (System("mtp-B1T256C256V1000", _mtp),),
    **POSITIONS,
    **ROUTERS,
    **LOSSES,
    **STATES,
}
