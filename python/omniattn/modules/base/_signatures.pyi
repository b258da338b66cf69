"""Written by tools/signatures.py: what the layers take, in both forms."""

import collections.abc
import typing
from typing import overload

import torch
import torch.nn.modules.module
import torch.nn.parameter

import omniattn.modules.attention.attention
import omniattn.modules.attention.differential
import omniattn.modules.attention.gau
import omniattn.modules.attention.mla
import omniattn.modules.attention.multihead
import omniattn.modules.attention.relative_attention
import omniattn.modules.attention.transformer_xl
import omniattn.modules.base.layer
import omniattn.modules.base.linear
import omniattn.modules.base.mlp
import omniattn.modules.base.norm
import omniattn.modules.base.positions
import omniattn.modules.base.residual
import omniattn.modules.base.rope
import omniattn.modules.base.short_conv
import omniattn.modules.blocks.decoder_block
import omniattn.modules.blocks.mtp
import omniattn.modules.experts.experts
import omniattn.modules.experts.moe
import omniattn.modules.experts.router
import omniattn.modules.recurrent.delta_net
import omniattn.modules.recurrent.linear_attention
import omniattn.modules.recurrent.mamba
import omniattn.modules.recurrent.mamba2
import omniattn.modules.recurrent.performer
import omniattn.modules.recurrent.rwkv
import omniattn.modules.recurrent.rwkv_heads
import omniattn.modules.recurrent.s4
import omniattn.modules.recurrent.selective_ssm
import omniattn.modules.recurrent.xlstm
import omniattn.modules.sparse.bigbird
import omniattn.modules.sparse.block_sparse
import omniattn.modules.sparse.dsa
import omniattn.modules.sparse.dual_chunk
import omniattn.modules.sparse.hub_spoke
import omniattn.modules.sparse.local_strided
import omniattn.modules.sparse.longformer
import omniattn.modules.sparse.moba
import omniattn.modules.sparse.neighborhood
import omniattn.modules.sparse.nsa
import omniattn.modules.sparse.routed_blocks
import omniattn.modules.sparse.selective_attention
import omniattn.modules.vision.spatial_reduction
import omniattn.modules.vision.swin
import omniattn.reference.rope_scaling

@overload
def ALiBi(
    self: torch.nn.Module,
    config: omniattn.modules.base.positions.ALiBi.Config,
    *,
    device: torch.device | str | None = ...,
) -> None: ...
@overload
def ALiBi(
    self: torch.nn.Module,
    num_heads: int,
    max_exponent: float = ...,
    trainable: bool = ...,
    form: str = ...,
    *,
    device: torch.device | str | None = ...,
) -> None: ...
@overload
def Attention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.attention.Attention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Attention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    causal: bool = ...,
    cross: bool = ...,
    source_dim: int | None = ...,
    window_size: tuple[int, int] = ...,
    qk_norm: str | None = ...,
    qk_norm_eps: float = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    sinks: bool = ...,
    head_scale: bool = ...,
    gate: str | None = ...,
    gate_activation: str = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    q_init_std: float | None = ...,
    backend: str | None = ...,
    qk_norm_offset: float = ...,
    normalizer: str = ...,
    norm_n: int | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def BigBirdAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.bigbird.BigBirdAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def BigBirdAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    block: int = ...,
    n_random: int = ...,
    seed: int = ...,
    draw: int = ...,
    causal: bool = ...,
    max_length: int | None = ...,
    count_duplicates: bool = ...,
    num_global_tokens: int = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def BlockSparseAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.block_sparse.BlockSparseAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def BlockSparseAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    block_size: int = ...,
    global_index: tuple[int, ...] = ...,
    causal: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DecoderBlock(
    self: torch.nn.Module,
    config: omniattn.modules.blocks.decoder_block.DecoderBlock.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DecoderBlock(
    self: torch.nn.Module,
    mixer: omniattn.modules.base.layer.LayerConfig,
    mlp: omniattn.modules.base.layer.LayerConfig | None,
    norm: omniattn.modules.base.layer.LayerConfig,
    cross: omniattn.modules.attention.attention.Attention.Config | None = ...,
    dropout_p: float = ...,
    residual_in_fp32: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeepSeekSparseAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.dsa.DeepSeekSparseAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeepSeekSparseAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    q_lora_rank: int | None,
    kv_lora_rank: int,
    qk_nope_dim: int,
    qk_rope_dim: int,
    v_dim: int,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    rope_interleaved: bool = ...,
    mscale: float = ...,
    latent_norm: bool = ...,
    q_rope_from: str = ...,
    separate_kv_latents: bool = ...,
    absorb_max: int = ...,
    norm_eps: float = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    index_heads: int | None = ...,
    index_dim: int = ...,
    index_topk: int = ...,
    index_rope_interleaved: bool = ...,
    indexer: str = ...,
    index_activation: str | None = ...,
    index_tie: str = ...,
    stage: str = ...,
    index_weight: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeltaAttention(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.linear_attention.DeltaAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeltaAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    head_dim: int | None = ...,
    feature_map: str = ...,
    normalize: bool | None = ...,
    causal: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    gates: str = ...,
    gates_of: str = ...,
    b_bias: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeltaNet(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.delta_net.DeltaNet.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeltaNet(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_v_heads: int | None = ...,
    head_dim: int | None = ...,
    v_head_dim: int | None = ...,
    conv_size: int = ...,
    conv_bias: bool = ...,
    gate: str | None = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    allow_neg_eigval: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeterministicSparseAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.hub_spoke.DeterministicSparseAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DeterministicSparseAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    window: int = ...,
    stride: int = ...,
    global_index: tuple[int, ...] = ...,
    anchor: str = ...,
    representative: str = ...,
    count_bias: bool = ...,
    levels: tuple[tuple[int, int], ...] | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DifferentialAttention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.differential.DifferentialAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DifferentialAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    depth: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    form: str = ...,
    gqa_map: str = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    rope_interleaved: bool = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DisentangledAttention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.relative_attention.DisentangledAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DisentangledAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    max_distance: int = ...,
    buckets: int = ...,
    content_to_position: bool = ...,
    position_to_content: bool = ...,
    share_projections: bool = ...,
    clamp_distance: bool = ...,
    p2c_index: str = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DualChunkAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.dual_chunk.DualChunkAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def DualChunkAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    chunk_size: int = ...,
    local_window: int = ...,
    train_length: int | None = ...,
    mscale: str | None = ...,
    rope_base: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Experts(
    self: torch.nn.Module,
    config: omniattn.modules.experts.experts.Experts.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Experts(
    self: torch.nn.Module,
    dim: int,
    hidden_dim: int,
    experts: int,
    activation: str = ...,
    bias: bool = ...,
    clamp: tuple[float, float] = ...,
    weigh_inputs: bool = ...,
    default_vectors: bool = ...,
    default_decay: float = ...,
    route_scale: float = ...,
    recompute: bool = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedAttentionUnit(
    self: torch.nn.Module,
    config: omniattn.modules.attention.gau.GatedAttentionUnit.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedAttentionUnit(
    self: torch.nn.Module,
    dim: int,
    expansion: int = ...,
    key_dim: int = ...,
    attention: str = ...,
    norm_n: int | None = ...,
    relative: str | None = ...,
    max_length: int = ...,
    bias_inside_n: bool = ...,
    causal: bool = ...,
    rope_interleaved: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedDeltaNet(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.delta_net.GatedDeltaNet.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedDeltaNet(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_v_heads: int | None = ...,
    head_dim: int | None = ...,
    v_head_dim: int | None = ...,
    conv_size: int = ...,
    conv_bias: bool = ...,
    gate: str | None = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    allow_neg_eigval: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedLinearAttention(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.linear_attention.GatedLinearAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedLinearAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_v_heads: int | None = ...,
    head_dim: int | None = ...,
    v_head_dim: int | None = ...,
    conv_size: int = ...,
    conv_bias: bool = ...,
    gate: str | None = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    gate_rank: int = ...,
    gate_normalizer: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedMLP(
    self: torch.nn.Module,
    config: omniattn.modules.base.mlp.GatedMLP.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GatedMLP(
    self: torch.nn.Module,
    dim: int,
    hidden_dim: int,
    activation: str = ...,
    bias: bool = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
    recompute: bool = ...,
    clamp: tuple[float, float] = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GroupNorm(
    self: torch.nn.Module,
    config: omniattn.modules.base.norm.GroupNorm.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def GroupNorm(
    self: torch.nn.Module,
    dim: int,
    num_groups: int,
    eps: float = ...,
    center: bool = ...,
    affine: bool = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def HubSpokeAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.hub_spoke.HubSpokeAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def HubSpokeAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    window: int = ...,
    global_index: tuple[int, ...] = ...,
    global_every: int | None = ...,
    dual: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def KimiDeltaAttention(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.delta_net.KimiDeltaAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def KimiDeltaAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_v_heads: int | None = ...,
    head_dim: int | None = ...,
    v_head_dim: int | None = ...,
    conv_size: int = ...,
    conv_bias: bool = ...,
    gate: str | None = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    allow_neg_eigval: bool = ...,
    lower_bound: float | None = ...,
    gate_bias: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LayerNorm(
    self: torch.nn.Module,
    config: omniattn.modules.base.norm.LayerNorm.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LayerNorm(
    self: torch.nn.Module,
    dim: int,
    eps: float = ...,
    bias: bool = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LearnedPositional(
    self: torch.nn.Module,
    config: omniattn.modules.base.positions.LearnedPositional.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LearnedPositional(
    self: torch.nn.Module,
    max_positions: int,
    dim: int,
    init_std: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Linear(
    self: torch.nn.Module,
    config: omniattn.modules.base.linear.Linear.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Linear(
    self: torch.nn.Module,
    in_features: int,
    out_features: int,
    bias: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LinearAttention(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.linear_attention.LinearAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LinearAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    head_dim: int | None = ...,
    feature_map: str = ...,
    normalize: bool | None = ...,
    causal: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LocalStridedAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.local_strided.LocalStridedAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LocalStridedAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    window: int = ...,
    stride: int = ...,
    gate: str = ...,
    residual_inside: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LongformerAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.longformer.LongformerAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def LongformerAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    window: int = ...,
    global_index: tuple[int, ...] = ...,
    dual: bool = ...,
    dilation: int | tuple[int, ...] = ...,
    causal: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MLP(
    self: torch.nn.Module,
    config: omniattn.modules.base.mlp.MLP.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MLP(
    self: torch.nn.Module,
    dim: int,
    hidden_dim: int,
    activation: str = ...,
    bias: bool = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    dropout_p: float = ...,
    recompute: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MLSTM(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.xlstm.MLSTM.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MLSTM(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    conv_size: int = ...,
    norm_eps: float = ...,
    backend: str | None = ...,
    inner_dim: int | None = ...,
    block_size: int = ...,
    eps: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Mamba(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.mamba.Mamba.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Mamba(
    self: torch.nn.Module,
    dim: int,
    d_state: int = ...,
    d_conv: int = ...,
    expand: int = ...,
    inner_dim: int | None = ...,
    dt_rank: int | None = ...,
    dt_min: float = ...,
    dt_max: float = ...,
    dt_init: str = ...,
    dt_scale: float = ...,
    dt_init_floor: float = ...,
    conv_bias: bool = ...,
    bias: bool = ...,
    norm_eps: float | None = ...,
    norm_weights: bool = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Mamba2(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.mamba2.Mamba2.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Mamba2(
    self: torch.nn.Module,
    dim: int,
    d_state: int = ...,
    d_conv: int = ...,
    expand: int = ...,
    headdim: int = ...,
    ngroups: int = ...,
    dt_limit: tuple[float, float] = ...,
    bias: bool = ...,
    conv_bias: bool = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MoBA(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.moba.MoBA.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MoBA(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    block_size: int = ...,
    topk: int = ...,
    decode: str = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MoE(
    self: torch.nn.Module,
    config: omniattn.modules.experts.moe.MoE.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MoE(
    self: torch.nn.Module,
    dim: int,
    hidden_dim: int,
    experts: int,
    top_k: int,
    *,
    shared_hidden_dim: int = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    options: typing.Any,
) -> None: ...
@overload
def MultiHeadLatentAttention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.mla.MultiHeadLatentAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiHeadLatentAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    q_lora_rank: int | None,
    kv_lora_rank: int,
    qk_nope_dim: int,
    qk_rope_dim: int,
    v_dim: int,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    rope_interleaved: bool = ...,
    mscale: float = ...,
    latent_norm: bool = ...,
    q_rope_from: str = ...,
    separate_kv_latents: bool = ...,
    absorb_max: int = ...,
    norm_eps: float = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiScaleRetention(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.linear_attention.MultiScaleRetention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiScaleRetention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_v_heads: int | None = ...,
    head_dim: int | None = ...,
    v_head_dim: int | None = ...,
    conv_size: int = ...,
    conv_bias: bool = ...,
    gate: str | None = ...,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    rope_interleaved: bool = ...,
    normalize: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiTokenPredictor(
    self: torch.nn.Module,
    config: omniattn.modules.blocks.mtp.MultiTokenPredictor.Config,
    block: collections.abc.Callable[[], torch.nn.modules.module.Module],
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiTokenPredictor(
    self: torch.nn.Module,
    dim: int,
    depths: int = ...,
    eps: float = ...,
    concat: str = ...,
    post_norm: bool = ...,
    parallel: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    block: collections.abc.Callable[[], torch.nn.modules.module.Module],
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiheadAttention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.multihead.MultiheadAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def MultiheadAttention(
    self: torch.nn.Module,
    embed_dim: int,
    num_heads: int,
    dropout: float = ...,
    bias: bool = ...,
    add_bias_kv: bool = ...,
    add_zero_attn: bool = ...,
    kdim: int | None = ...,
    vdim: int | None = ...,
    batch_first: bool = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NSA(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.nsa.NSA.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NSA(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    compress_size: int = ...,
    compress_stride: int = ...,
    block_size: int = ...,
    topk: int = ...,
    window: int = ...,
    compress: str = ...,
    compress_dim: int = ...,
    separate_kv: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention1D(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.neighborhood.NeighborhoodAttention1D.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention1D(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = ...,
    dilation: int | tuple[int, ...] = ...,
    is_causal: bool | tuple[bool, ...] = ...,
    qkv_bias: bool = ...,
    qk_scale: float | None = ...,
    attn_drop: float = ...,
    proj_drop: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention2D(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.neighborhood.NeighborhoodAttention2D.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention2D(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = ...,
    dilation: int | tuple[int, ...] = ...,
    is_causal: bool | tuple[bool, ...] = ...,
    qkv_bias: bool = ...,
    qk_scale: float | None = ...,
    attn_drop: float = ...,
    proj_drop: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention3D(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.neighborhood.NeighborhoodAttention3D.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def NeighborhoodAttention3D(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = ...,
    dilation: int | tuple[int, ...] = ...,
    is_causal: bool | tuple[bool, ...] = ...,
    qkv_bias: bool = ...,
    qk_scale: float | None = ...,
    attn_drop: float = ...,
    proj_drop: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def PatchMerging(
    self: torch.nn.Module,
    config: omniattn.modules.vision.swin.PatchMerging.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def PatchMerging(
    self: torch.nn.Module,
    dim: int,
    norm_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Performer(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.performer.Performer.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Performer(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    head_dim: int | None = ...,
    features: int | None = ...,
    kind: str = ...,
    orthogonal: bool = ...,
    row_norm: str = ...,
    causal: bool = ...,
    scale: float | None = ...,
    eps: float = ...,
    feature_eps: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RMSNorm(
    self: torch.nn.Module,
    config: omniattn.modules.base.norm.RMSNorm.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RMSNorm(
    self: torch.nn.Module,
    dim: int,
    eps: float = ...,
    offset: float = ...,
    casting: str = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RMSNormGated(
    self: torch.nn.Module,
    config: omniattn.modules.base.norm.RMSNormGated.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RMSNormGated(
    self: torch.nn.Module,
    dim: int,
    eps: float = ...,
    norm_before_gate: bool = ...,
    activation: str = ...,
    num_groups: int = ...,
    casting: str = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV4TimeMix(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.rwkv.RWKV4TimeMix.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV4TimeMix(
    self: torch.nn.Module,
    dim: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV5TimeMix(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.rwkv_heads.RWKV5TimeMix.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV5TimeMix(
    self: torch.nn.Module,
    dim: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    init_std: float = ...,
    backend: str | None = ...,
    head_dim: int = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV6TimeMix(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.rwkv_heads.RWKV6TimeMix.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV6TimeMix(
    self: torch.nn.Module,
    dim: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    init_std: float = ...,
    backend: str | None = ...,
    head_dim: int = ...,
    mix_rank: int = ...,
    decay_rank: int = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV7TimeMix(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.rwkv_heads.RWKV7TimeMix.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKV7TimeMix(
    self: torch.nn.Module,
    dim: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    init_std: float = ...,
    backend: str | None = ...,
    head_dim: int = ...,
    decay_rank: int | None = ...,
    a_rank: int | None = ...,
    v_rank: int | None = ...,
    gate_rank: int | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKVChannelMix(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.rwkv.RWKVChannelMix.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RWKVChannelMix(
    self: torch.nn.Module,
    dim: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    init_std: float = ...,
    backend: str | None = ...,
    hidden_dim: int | None = ...,
    receptance: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Residual(
    self: torch.nn.Module,
    layer: torch.nn.modules.module.Module,
    config: omniattn.modules.base.residual.Residual.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Residual(
    self: torch.nn.Module,
    layer: torch.nn.modules.module.Module,
    norm: omniattn.modules.base.layer.LayerConfig,
    placement: str = ...,
    dropout_p: float = ...,
    drop_path_p: float = ...,
    residual_in_fp32: bool = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RotaryEmbedding(
    self: torch.nn.Module, config: omniattn.modules.base.rope.RotaryEmbedding.Config
) -> None: ...
@overload
def RotaryEmbedding(
    self: torch.nn.Module,
    rotary_dim: int,
    base: float = ...,
    scaling: omniattn.reference.rope_scaling.RopeScaling | None = ...,
    sticky: bool = ...,
    sections: tuple[int, ...] | None = ...,
    sections_interleaved: bool = ...,
    num_axes: int = ...,
) -> None: ...
@overload
def RoutedBlockAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.routed_blocks.RoutedBlockAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def RoutedBlockAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    bias: bool = ...,
    out_bias: bool = ...,
    rope_interleaved: bool = ...,
    scale: float | None = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    block_size: int = ...,
    topk: int = ...,
    query_block: int = ...,
    router_dim: int = ...,
    router_grad: str = ...,
    router_weight: float = ...,
    decode: str = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Router(
    self: torch.nn.Module,
    config: omniattn.modules.experts.router.Router.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def Router(
    self: torch.nn.Module,
    dim: int,
    experts: int,
    top_k: int,
    router: str = ...,
    router_bias: bool = ...,
    renormalize: bool = ...,
    route_scale: float = ...,
    groups: int = ...,
    top_groups: int = ...,
    router_grad: str = ...,
    jitter: float = ...,
    noise_eps: float = ...,
    capacity_factor: float | None = ...,
    capacity: int | None = ...,
    capacity_per_sequence: bool = ...,
    capacity_by_score: bool = ...,
    capacity_at_eval: bool = ...,
    bias_rate: float = ...,
    init_std: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def S4(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.s4.S4.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def S4(
    self: torch.nn.Module,
    dim: int,
    state_size: int = ...,
    dt_min: float = ...,
    dt_max: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def S4D(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.s4.S4D.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def S4D(
    self: torch.nn.Module,
    dim: int,
    state_size: int = ...,
    dt_min: float = ...,
    dt_max: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    init: str = ...,
    rule: str = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SLSTM(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.xlstm.SLSTM.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SLSTM(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    layer_idx: int = ...,
    num_layers: int = ...,
    conv_size: int = ...,
    norm_eps: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SelectiveAttention(
    self: torch.nn.Module,
    config: omniattn.modules.sparse.selective_attention.SelectiveAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SelectiveAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    num_kv_heads: int | None = ...,
    head_dim: int | None = ...,
    budget: int | None = ...,
    rope_interleaved: bool = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    out_init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def ShortConvolution(
    self: torch.nn.Module,
    config: omniattn.modules.base.short_conv.ShortConvolution.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def ShortConvolution(
    self: torch.nn.Module,
    dim: int,
    kernel_size: int = ...,
    bias: bool = ...,
    activation: str | None = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SimpleSelectiveSSM(
    self: torch.nn.Module,
    config: omniattn.modules.recurrent.selective_ssm.SimpleSelectiveSSM.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SimpleSelectiveSSM(
    self: torch.nn.Module,
    dim: int,
    d_state: int = ...,
    hidden_dim: int | None = ...,
    a_dep: bool = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SinCosPositional2d(
    self: torch.nn.Module, config: omniattn.modules.base.positions.SinCosPositional2d.Config
) -> None: ...
@overload
def SinCosPositional2d(
    self: torch.nn.Module, dim: int, prefix: int = ..., order: str = ..., base: float = ...
) -> None: ...
@overload
def SinusoidalPositional(
    self: torch.nn.Module, config: omniattn.modules.base.positions.SinusoidalPositional.Config
) -> None: ...
@overload
def SinusoidalPositional(
    self: torch.nn.Module,
    dim: int,
    layout: str = ...,
    freqs: str = ...,
    base: float = ...,
    scale_input: bool = ...,
) -> None: ...
@overload
def SpatialReductionAttention(
    self: torch.nn.Module,
    config: omniattn.modules.vision.spatial_reduction.SpatialReductionAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SpatialReductionAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    sr_ratio: int = ...,
    bias: bool = ...,
    norm_eps: float = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SwinBlock(
    self: torch.nn.Module,
    config: omniattn.modules.vision.swin.SwinBlock.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def SwinBlock(
    self: torch.nn.Module,
    attention: omniattn.modules.vision.swin.WindowAttention.Config,
    mlp_ratio: float = ...,
    drop_path_p: float = ...,
    norm_eps: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def T5RelativeBias(
    self: torch.nn.Module,
    config: omniattn.modules.attention.relative_attention.T5RelativeBias.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def T5RelativeBias(
    self: torch.nn.Module,
    num_heads: int,
    num_buckets: int = ...,
    max_distance: int = ...,
    bidirectional: bool = ...,
    init_std: float = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def TransformerXLAttention(
    self: torch.nn.Module,
    config: omniattn.modules.attention.transformer_xl.TransformerXLAttention.Config,
    *,
    biases: tuple[torch.nn.parameter.Parameter, torch.nn.parameter.Parameter] | None = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def TransformerXLAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    head_dim: int | None = ...,
    memory_length: int = ...,
    same_length: bool = ...,
    clamp_length: int = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    biases: tuple[torch.nn.parameter.Parameter, torch.nn.parameter.Parameter] | None = ...,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def WindowAttention(
    self: torch.nn.Module,
    config: omniattn.modules.vision.swin.WindowAttention.Config,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
@overload
def WindowAttention(
    self: torch.nn.Module,
    dim: int,
    num_heads: int,
    window: int = ...,
    shift: int = ...,
    bias: bool = ...,
    dropout_p: float = ...,
    init_std: float = ...,
    backend: str | None = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
) -> None: ...
