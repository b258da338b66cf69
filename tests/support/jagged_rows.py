"""Rows of sequences, jagged nested tensors of them, and layers for both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omniattn.modules import (
    HGRN,
    HGRN2,
    MLSTM,
    S4,
    S4D,
    SLSTM,
    ABCAttention,
    AtlasLinear,
    Comba,
    CyclicFlowAttention,
    DeepSeekSparseAttention,
    DeltaAttention,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedKalmaNet,
    GatedLinearAttention,
    GatedSlotAttention,
    KimiDeltaAttention,
    LargeMLSTM,
    LightNet,
    LightningAttention,
    LinearAttention,
    LogLinearMamba2,
    Longhorn,
    Mamba,
    Mamba2,
    Mamba3,
    MesaNet,
    MixtureOfMemories,
    MultiScaleRetention,
    Performer,
    PrecondGatedDeltaNet,
    PrecondKDA,
    Raven,
    ReBased,
    Rodimus,
    RotaryEmbedding,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    RWKVQuadratic,
    RWKVRecurrent,
    SimpleSelectiveSSM,
    TitansLinear,
    TitansMLP,
    TTTLinear,
)

LENGTHS = (5, 1, 9)
DTYPE = torch.float64


def sequences() -> list[torch.Tensor]:
    return [torch.randn(n, 16, dtype=DTYPE, requires_grad=True) for n in LENGTHS]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


#: A module and a call of it on tokens x at these positions in their sequences.
Case = tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def rotated(config: Any) -> Case:
    layer, rotary = config.build(dtype=DTYPE), RotaryEmbedding(4)
    return layer, lambda x, at: layer(x, rope=rotary(at))


def sparse_latent(stage: str) -> Case:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_dim": 6, "qk_rope_dim": 4, "v_dim": 5}
    sizes |= {"index_heads": 2, "index_dim": 6, "index_topk": 3}
    return rotated(DeepSeekSparseAttention.Config(16, 2, **sizes, stage=stage, **STD))


STD = {"init_std": 0.5}


def block(module: nn.Module) -> Case:
    return module, lambda x, _: module(x)


#: Layers that read one token after another.
RECURRENT = {
    "linear": LinearAttention.Config(16, 2),
    "linear-both": LinearAttention.Config(16, 2, causal=False),
    "delta-attention": DeltaAttention.Config(16, 2, gates="heads", gates_of="x"),
    "performer": Performer.Config(16, 2),
    "performer-both": Performer.Config(16, 2, causal=False, kind="hyperbolic"),
    "gla": GatedLinearAttention.Config(16, 2),
    "retention": MultiScaleRetention.Config(16, 4, normalize=True, conv_size=2),
    "delta": DeltaNet.Config(16, 2),
    "gated-delta": GatedDeltaNet.Config(16, 2, num_v_heads=4),
    "gsa": GatedSlotAttention.Config(16, 2, conv_size=2),
    "rodimus": Rodimus.Config(16, 4, conv_size=2),
    "mom": MixtureOfMemories.Config(16, 2, num_memories=3),
    "raven": Raven.Config(16, 2, top_k=3, decay="slots"),
    "abc": ABCAttention.Config(16, 2),
    "hgrn": HGRN.Config(16, conv_size=2),
    "hgrn2": HGRN2.Config(16, 2, num_v_heads=4, conv_size=2),
    "lightnet": LightNet.Config(16, 2, num_v_heads=4),
    "lightning": LightningAttention.Config(16, 2),
    "rebased": ReBased.Config(16, 2),
    "comba": Comba.Config(16, 2, num_v_heads=4),
    "gated-deltanet2": GatedDeltaNet2.Config(16, 2, num_v_heads=4),
    "gated-deltaproduct": GatedDeltaProduct.Config(16, 2, num_v_heads=4),
    "kda": KimiDeltaAttention.Config(16, 2),
    "precond-gated-deltanet": PrecondGatedDeltaNet.Config(16, 2, num_v_heads=4),
    "ttt": TTTLinear.Config(16, 2, 4),
    "titans": TitansLinear.Config(16, 2, mini_batch_size=4),
    "titans-mlp": TitansMLP.Config(16, 2, mini_batch_size=4),
    "atlas": AtlasLinear.Config(16, 2, mini_batch_size=4, window=3, degree=2),
    "mesanet": MesaNet.Config(16, 2),
    "cyfa": CyclicFlowAttention.Config(16, 2, num_slots=5),
    "gated-kalmanet": GatedKalmaNet.Config(16, 2),
    "precond-kda": PrecondKDA.Config(16, 2, num_v_heads=4),
    "rwkv4": RWKV4TimeMix.Config(16),
    "rwkv5": RWKV5TimeMix.Config(16, head_dim=8),
    "rwkv6": RWKV6TimeMix.Config(16, head_dim=8),
    "rwkv7": RWKV7TimeMix.Config(16, head_dim=8),
    "rwkv-channel": RWKVChannelMix.Config(16),
    "mlstm": MLSTM.Config(16, 2, inner_dim=16),
    "slstm": SLSTM.Config(16, 2),
    "large-mlstm": LargeMLSTM.Config(16, 2),
    "rwkv-quadratic": RWKVQuadratic.Config(16, 2, per_channel=True),
    "rwkv-recurrent": RWKVRecurrent.Config(16, 2),
    "longhorn": Longhorn.Config(16, 3),
    "mamba": Mamba.Config(16, 3),
    "mamba2": Mamba2.Config(16, 4, headdim=8),
    "mamba3": Mamba3.Config(16, 4, headdim=8, is_outproj_norm=True),
    "log-linear": LogLinearMamba2.Config(16, 4, headdim=8, num_levels=8),
    "selective-ssm": SimpleSelectiveSSM.Config(16, 3),
    "s4": S4.Config(16, 4),
    "s4d": S4D.Config(16, 4),
}


def recurrent(name: str) -> Case:
    layer = RECURRENT[name].build(dtype=DTYPE)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    if name != "retention":
        return block(layer)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(4))
    return layer, lambda x, at: layer(x, rope=rotary(at))
