"""Pre-norm block: attention and feed-forward layer, each on a residual stream."""

from dataclasses import dataclass

import torch

from omniattn.functional.scores import RelativeBias
from omniattn.modules.attention import Attention
from omniattn.modules.build import AttentionConfig, FeedForwardConfig, NormConfig, build
from omniattn.modules.dropout import Dropout
from omniattn.modules.kv_cache import Cache
from omniattn.modules.layer import Layer, LayerConfig, config_or_fields
from omniattn.reference.precision import widen


class DecoderBlock(Layer):
    """h = h + Attention(Norm(h)); h = h + MLP(Norm(h)); an encoder's too, with causal=False.

    With `cross`, h = h + Cross(Norm(h), memory) comes between the two. Each addition is done by the
    norm that follows it, in one pass over memory. The block therefore takes and returns a pair
    (x, residual) whose sum is h; the norm after the last block adds them.

    Args:
        config: of the two layers and of the norms in front of them.
        device, dtype: of the parameters.

    Shape:
        x, residual (B, T, dim) -> x, residual (B, T, dim).
        Parameters input_layernorm, self_attn, cross_attention_layernorm, cross_attn,
        post_attention_layernorm, mlp.

    Example:
        >>> from omniattn.modules import Attention, GatedMLP, RMSNorm
        >>> config = DecoderBlock.Config(
        ...     Attention.Config(8, 2), GatedMLP.Config(8, 16), RMSNorm.Config(8)
        ... )
        >>> x, residual = DecoderBlock(config)(torch.ones(1, 3, 8))
        >>> x.shape, residual.shape
        (torch.Size([1, 3, 8]), torch.Size([1, 3, 8]))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Configs of the layers.

        Args:
            attention: of Attention, MultiHeadLatentAttention or DifferentialAttention.
            mlp: of GatedMLP, MLP or MoE.
            norm: of RMSNorm or LayerNorm, used in front of each layer.
            cross: attention to another sequence, in between.
            dropout_p: of what each layer adds.
            residual_in_fp32: keeps the residual in float32 where x has 16 bits; under autocast it
                is anyway.
        """

        attention: AttentionConfig
        mlp: FeedForwardConfig
        norm: NormConfig
        cross: Attention.Config | None = None
        dropout_p: float = 0.0
        residual_in_fp32: bool = False

    @config_or_fields(Config)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = build(config.norm, device=device, dtype=dtype)
        self.self_attn = build(config.attention, device=device, dtype=dtype)
        self.cross_attn: Attention | None = None
        if config.cross is not None:
            self.cross_attention_layernorm = build(config.norm, device=device, dtype=dtype)
            self.cross_attn = Attention(config.cross, device=device, dtype=dtype)
        self.post_attention_layernorm = build(config.norm, device=device, dtype=dtype)
        self.mlp = build(config.mlp, device=device, dtype=dtype)
        self.dropout = Dropout(config.dropout_p)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        mask: torch.Tensor | None = None,
        relative: RelativeBias | None = None,
        memory: torch.Tensor | None = None,
        memory_cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block; `residual` is None in front of the first one.

        `memory` and `memory_cache` are source and cache of the cross-attention. The rest as in
        Attention; `relative` only with layers that have it.
        """
        if residual is None:
            y, residual = self.input_layernorm(x), x
            if self.config.residual_in_fp32:
                residual = widen(x)
        else:
            y, residual = self.input_layernorm(x, residual)
        scores = {} if relative is None else {"relative": relative}
        x = self.dropout(self.self_attn(y, rope=rope, cache=cache, mask=mask, **scores))
        if self.cross_attn is not None:
            y, residual = self.cross_attention_layernorm(x, residual)
            x = self.dropout(self.cross_attn(y, memory, cache=memory_cache))
        y, residual = self.post_attention_layernorm(x, residual)
        return self.dropout(self.mlp(y)), residual
