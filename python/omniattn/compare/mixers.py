"""Mixers by name, and decoders that differ in their mixer alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from omniattn.compare.baselines import TorchRecurrence
from omniattn.models import BlocksConfig
from omniattn.modules import (
    HGRN,
    HGRN2,
    MLSTM,
    NSA,
    S4,
    S4D,
    SLSTM,
    ABCAttention,
    AtlasLinear,
    Attention,
    AttentionResiduals,
    BigBirdAttention,
    Comba,
    CompressedSparseAttention,
    CyclicFlowAttention,
    DecoderBlock,
    DeltaAttention,
    DeltaFormerAttention,
    DeltaNet,
    DeterministicSparseAttention,
    DifferentialAttention,
    DualChunkAttention,
    Engram,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedKalmaNet,
    GatedLinearAttention,
    GatedMLP,
    GatedSlotAttention,
    HubSpokeAttention,
    HyperConnections,
    KimiDeltaAttention,
    LayerConfig,
    LightNet,
    LightningAttention,
    LinearAttention,
    LocalStridedAttention,
    LogLinearMamba2,
    LongformerAttention,
    Longhorn,
    Mamba,
    Mamba2,
    Mamba3,
    ManifoldHyperConnections,
    MesaNet,
    MixtureOfMemories,
    MoBA,
    MultiHeadLatentAttention,
    MultiScaleRetention,
    MultiTokenAttention,
    ParallaxAttention,
    PaTHAttention,
    Performer,
    PrecondGatedDeltaNet,
    PrecondKDA,
    Raven,
    ReBased,
    RMSNorm,
    Rodimus,
    RotaryEmbedding,
    RoutedBlockAttention,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    SelectAttention,
    SelectiveAttention,
    TitansLinear,
    TitansMLP,
    TTTLinear,
    WallAttention,
)


@dataclass(frozen=True)
class Place:
    """Width and place of a layer, from which the config of its mixer follows."""

    dim: int
    heads: int
    layer: int
    layers: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


@dataclass(frozen=True)
class Kind:
    """Mixer by name.

    Args:
        mixer: returns the config of a layer's mixer.
        rotates: True if it uses the rotary embedding.
        recurrent: True if its state does not grow with the sequence.
        rwkv: True for RWKV's channel mixer instead of the gated MLP.
        streams: config of the residual form from its width, None for the plain residual stream.
        canon: places of Canon layers in its blocks.
        engram: config of the Engram before its blocks from the frame, None for none.
    """

    mixer: Callable[[Place], LayerConfig]
    rotates: bool = False
    recurrent: bool = False
    rwkv: bool = False
    streams: Callable[[int], LayerConfig] | None = None
    canon: str = ""
    engram: Callable[[Frame], Engram.Config] | None = None


def _heads(config: Callable[..., LayerConfig], **options: Any) -> Callable[[Place], LayerConfig]:
    return lambda p: config(p.dim, p.heads, **options)


def _width(config: Callable[..., LayerConfig], **options: Any) -> Callable[[Place], LayerConfig]:
    return lambda p: config(p.dim, **options)


def _ngrams(frame: Frame) -> Engram.Config:
    """Returns the config of an Engram with as many parameters as a channel mixer has."""
    sizes = (3 * frame.dim, 3 * frame.dim)
    return Engram.Config(frame.dim, frame.vocab, sizes, ngram_dim=frame.dim, num_heads=frame.heads)


def _attention(config: Callable[..., LayerConfig], **options: Any) -> Kind:
    return Kind(_heads(config, **options), rotates=True)


def _recurrence(config: Callable[..., LayerConfig], **options: Any) -> Kind:
    return Kind(_heads(config, **options), recurrent=True)


def _space(config: Callable[..., LayerConfig], **options: Any) -> Kind:
    return Kind(_width(config, **options), recurrent=True)


def _rwkv(config: Callable[..., LayerConfig], *, sized: bool = True) -> Kind:
    def mixer(p: Place) -> LayerConfig:
        return config(p.dim, p.layer, p.layers, **({"head_dim": p.head} if sized else {}))

    return Kind(mixer, recurrent=True, rwkv=True)


def _mla(**options: Any) -> Kind:
    return Kind(
        lambda p: MultiHeadLatentAttention.Config(
            *(p.dim, p.heads, None, p.dim // 2, p.head, p.head, p.head),
            rope_interleaved=False,
            **options,
        ),
        rotates=True,
    )


def _csa(**options: Any) -> Kind:
    return Kind(
        lambda p: CompressedSparseAttention.Config(
            *(p.dim, p.heads, p.head, p.dim // 2, p.head, p.heads, p.head),
            window=16,
            index_dim=p.head,
            **options,
        ),
        rotates=True,
    )


def _yoco(p: Place) -> LayerConfig:
    """Windows in the first half of the layers, then one layer's keys and values for the others."""
    first = p.layers // 2
    if p.layer < first:
        return Attention.Config(p.dim, p.heads, window_size=(31, 0))
    return Attention.Config(p.dim, p.heads, shared_kv="source" if p.layer == first else "reader")


def _placed(config: Callable[..., LayerConfig]) -> Kind:
    return Kind(lambda p: config(p.dim, p.heads, p.layer, p.layers), recurrent=True)


#: Mixers by the names of `--models`, small enough for sequences of a hundred tokens.
KINDS: dict[str, Kind] = {
    "llama": _attention(Attention.Config),
    "mqa": _attention(Attention.Config, num_kv_heads=1),
    "mla": _mla(),
    "differential": Kind(
        lambda p: DifferentialAttention.Config(
            p.dim, p.heads // 2, p.layer, rope_interleaved=False
        ),
        rotates=True,
    ),
    "select": _attention(SelectAttention.Config),
    "selective": _attention(SelectiveAttention.Config),
    "deltaformer": _attention(DeltaFormerAttention.Config),
    "forgetting": Kind(_heads(Attention.Config, forget_gate=True)),
    "stick-breaking": Kind(
        _heads(Attention.Config, normalizer="stick_breaking", attend_current=False)
    ),
    "softpick": _attention(Attention.Config, normalizer="softpick"),
    "path": Kind(_heads(PaTHAttention.Config)),
    "wall": Kind(_heads(WallAttention.Config)),
    "ssmax": _attention(Attention.Config, log_scale=True),
    "tpa": _attention(Attention.Config, ranks=(4, 2, 2)),
    "mlra": _mla(num_latents=4, num_branches=4, latent_scale=True),
    "resformer": Kind(
        lambda p: Attention.Config(p.dim, p.heads, value_residual="later" if p.layer else "first"),
        rotates=True,
    ),
    "yoco": Kind(_yoco, rotates=True),
    "hyper": replace(_attention(Attention.Config), streams=HyperConnections.Config),
    "mhc": replace(_attention(Attention.Config), streams=ManifoldHyperConnections.Config),
    "attnres": replace(_attention(Attention.Config), streams=AttentionResiduals.Config),
    "canon": replace(_attention(Attention.Config), canon="ABCD"),
    "parallax": _attention(ParallaxAttention.Config),
    "mta": _attention(MultiTokenAttention.Config, query_size=4, key_size=5),
    "engram": replace(_attention(Attention.Config), engram=_ngrams),
    "mfa": Kind(lambda p: Attention.Config(p.dim, p.heads, 1, q_rank=p.dim // 2), rotates=True),
    "window": _attention(Attention.Config, window_size=(31, 0)),
    "longformer": _attention(LongformerAttention.Config, window=32, global_index=(0,), causal=True),
    "bigbird": _attention(
        BigBirdAttention.Config, block=8, n_random=1, causal=True, max_length=16384
    ),
    "hub-spoke": _attention(HubSpokeAttention.Config, window=15, global_every=16, dual="disjoint"),
    "detsa": _attention(DeterministicSparseAttention.Config, window=15, stride=8),
    "dual-chunk": Kind(_heads(DualChunkAttention.Config, chunk_size=48, local_window=16)),
    "local-strided": _attention(LocalStridedAttention.Config, window=16, stride=8),
    "nsa": _attention(
        NSA.Config,
        compress_size=8,
        compress_stride=4,
        block_size=8,
        topk=4,
        window=16,
        compress_dim=32,
    ),
    "moba": _attention(MoBA.Config, block_size=8, topk=4, decode="moba"),
    "csa": _csa(compress_rate=4, index_topk=8, index_heads=4),
    "hca": _csa(compress_rate=8, overlap=False, index_topk=None),
    "routed-blocks": _attention(RoutedBlockAttention.Config, block_size=8, topk=4, router_dim=16),
    "linear": _recurrence(LinearAttention.Config),
    "delta-attention": _recurrence(DeltaAttention.Config),
    "performer": _recurrence(Performer.Config),
    "gla": _recurrence(GatedLinearAttention.Config),
    "retnet": replace(_recurrence(MultiScaleRetention.Config), rotates=True),
    "deltanet": _recurrence(DeltaNet.Config),
    "gated-deltanet": _recurrence(GatedDeltaNet.Config),
    "gated-deltaproduct": _recurrence(GatedDeltaProduct.Config),
    "gated-deltanet2": _recurrence(GatedDeltaNet2.Config),
    "mom": _recurrence(MixtureOfMemories.Config, num_memories=4),
    "comba": _recurrence(Comba.Config),
    "hgrn": _space(HGRN.Config),
    "rodimus": _space(Rodimus.Config, d_state=16),
    "hgrn2": _recurrence(HGRN2.Config),
    "lightning": Kind(
        lambda p: LightningAttention.Config(p.dim, p.heads, layer_idx=p.layer, num_layers=p.layers),
        recurrent=True,
    ),
    "lightnet": _recurrence(LightNet.Config, gate_rank=16),
    "based": _recurrence(LinearAttention.Config, feature_map="taylor", feature_dim=8),
    "rebased": _recurrence(ReBased.Config, feature_dim=8),
    "kda": _recurrence(KimiDeltaAttention.Config),
    "gsa": _recurrence(GatedSlotAttention.Config),
    "raven": _recurrence(Raven.Config, top_k=4),
    "abc": replace(_recurrence(ABCAttention.Config), rotates=True),
    "precond-gated-deltanet": _recurrence(PrecondGatedDeltaNet.Config),
    "precond-kda": _recurrence(PrecondKDA.Config),
    "mesanet": _recurrence(MesaNet.Config),
    "cyfa": _recurrence(CyclicFlowAttention.Config),
    "gated-kalmanet": _recurrence(GatedKalmaNet.Config),
    "ttt": _recurrence(TTTLinear.Config),
    "titans": _recurrence(TitansLinear.Config),
    "titans-mlp": _recurrence(TitansMLP.Config),
    "atlas": _recurrence(AtlasLinear.Config),
    "rwkv4": _rwkv(RWKV4TimeMix.Config, sized=False),
    "rwkv5": _rwkv(RWKV5TimeMix.Config),
    "rwkv6": _rwkv(RWKV6TimeMix.Config),
    "rwkv7": _rwkv(RWKV7TimeMix.Config),
    "mlstm": _placed(MLSTM.Config),
    "slstm": _placed(SLSTM.Config),
    "s4": _space(S4.Config, state_size=16),
    "s4d": _space(S4D.Config, state_size=16),
    "mamba": _space(Mamba.Config),
    "longhorn": _space(Longhorn.Config),
    "mamba2": Kind(lambda p: Mamba2.Config(p.dim, d_state=32, headdim=p.head), recurrent=True),
    "log-linear-mamba2": Kind(
        lambda p: LogLinearMamba2.Config(p.dim, d_state=32, headdim=p.head), recurrent=True
    ),
    "mamba3": Kind(lambda p: Mamba3.Config(p.dim, d_state=32, headdim=p.head), recurrent=True),
    "rnn": _space(TorchRecurrence.Config, cell="rnn"),
    "lstm": _space(TorchRecurrence.Config, cell="lstm"),
    "gru": _space(TorchRecurrence.Config, cell="gru"),
}
#: Attention layers in hybrids.
FULL = KINDS["llama"]


@dataclass(frozen=True)
class Frame:
    """Sizes that the models of a comparison share.

    Args:
        dim, layers, heads: width, number of layers and of heads.
        vocab: number of tokens.
    """

    dim: int = 64
    layers: int = 4
    heads: int = 2
    vocab: int = 256

    @property
    def init_std(self) -> float:
        """Standard deviation of initial weights; that of wide layers would learn late."""
        return float(self.dim**-0.5)

    @property
    def out_init_std(self) -> float:
        """Standard deviation of projections onto the residual stream."""
        return float(self.init_std / (2 * self.layers) ** 0.5)

    def drawn(self, config: Any) -> Any:
        """Sets the standard deviations that the config of a layer has."""
        known = {field.name for field in fields(config)}
        values = {name: getattr(self, name) for name in ("init_std", "out_init_std")}
        return replace(config, **{n: value for n, value in values.items() if n in known})

    def place(self, layer: int) -> Place:
        """Returns the place of a layer."""
        return Place(self.dim, self.heads, layer, self.layers)


@dataclass(frozen=True)
class Candidate:
    """Model of a comparison: a decoder whose layers have the mixers of `kinds` in turn.

    Args:
        name: name in the report.
        kinds: mixers, repeated over the layers.
        version: identifies the code of a user's mixer.
    """

    name: str
    kinds: tuple[Kind, ...]
    version: str = ""

    def config(self, frame: Frame, hidden: int) -> BlocksConfig:
        """Returns the decoder with channel mixers of this hidden width.

        Raises:
            ValueError: the layers are no whole number of turns, so that the shares of the mixers
                would not be those of the name.
        """
        if frame.layers % len(self.kinds):
            raise ValueError(
                f"compare: layers must be a multiple of {len(self.kinds)} for {self.name}, "
                f"got layers={frame.layers}"
            )
        norm = RMSNorm.Config(frame.dim)
        blocks = []
        for layer in range(frame.layers):
            kind = self.kinds[layer % len(self.kinds)]
            mlp: LayerConfig = GatedMLP.Config(frame.dim, hidden)
            if kind.rwkv:
                mlp = RWKVChannelMix.Config(
                    *(frame.dim, layer, frame.layers), hidden_dim=hidden, receptance=False
                )
            mixer = frame.drawn(kind.mixer(frame.place(layer)))
            streams = None if kind.streams is None else kind.streams(frame.dim)
            more: dict[str, Any] = {"streams": streams, "canon": kind.canon}
            blocks.append(DecoderBlock.Config(mixer, frame.drawn(mlp), norm, **more))
        memories = [n for n in range(frame.layers) if self.kinds[n % len(self.kinds)].engram]
        engram = next((kind.engram for kind in self.kinds if kind.engram is not None), None)
        rotates = any(kind.rotates for kind in self.kinds)
        return BlocksConfig(
            vocab_size=frame.vocab,
            dim=frame.dim,
            num_layers=frame.layers,
            blocks=tuple(blocks),
            rope=RotaryEmbedding.Config(frame.dim // frame.heads) if rotates else None,
            init_std=frame.init_std,
            engram=None if engram is None else frame.drawn(engram(frame)),
            engram_layers=tuple(memories),
        )
