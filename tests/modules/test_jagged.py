"""Layers and blocks on jagged nested tensors equal themselves on each sequence alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_rows import (
    DTYPE,
    LENGTHS,
    RECURRENT,
    STD,
    Case,
    block,
    jagged,
    recurrent,
    rotated,
    sequences,
    sparse_latent,
)
from layer_checks import functions_of_positions
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from omniattn.modules import (
    MLP,
    NSA,
    Attention,
    BigBirdAttention,
    BlockSparseAttention,
    CompressedSparseAttention,
    CrossCache,
    DecoderBlock,
    DeltaNet,
    DifferentialAttention,
    DisentangledAttention,
    Dropout,
    DualChunkAttention,
    GatedAttentionUnit,
    GatedMLP,
    GroupNorm,
    HubSpokeAttention,
    LayerNorm,
    LongformerAttention,
    MoBA,
    MultiheadAttention,
    MultiHeadLatentAttention,
    MultiTokenAttention,
    NeighborhoodAttention1D,
    ParallaxAttention,
    ParallelResidual,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    RoutedBlockAttention,
    RWKV6TimeMix,
    RWKVChannelMix,
    SelectAttention,
    SelectiveAttention,
    T5RelativeBias,
    TransformerXLAttention,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attention() -> Attention:
    return Attention(Attention.Config(16, 4, 2, qk_norm="rms", init_std=0.5), dtype=DTYPE)


def readme_block(norm: type, placement: str) -> torch.nn.Sequential:
    config = Residual.Config(norm.Config(16), placement=placement)
    mlp = GatedMLP(GatedMLP.Config(16, 24, init_std=0.5), dtype=DTYPE)
    layers = attention(), mlp
    return torch.nn.Sequential(*(Residual(layer, config, dtype=DTYPE) for layer in layers))


def parallel_block() -> torch.nn.Sequential:
    mlp = MLP(MLP.Config(16, 24, init_std=0.5), dtype=DTYPE)
    block = ParallelResidual([attention(), mlp], LayerNorm.Config(16), dtype=DTYPE)
    return torch.nn.Sequential(block, GroupNorm(GroupNorm.Config(16, 4), dtype=DTYPE))


def latent(*, absorb: bool, **options: object) -> Case:
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_dim": 6, "qk_rope_dim": 4, "v_dim": 5}
    config = MultiHeadLatentAttention.Config(16, 2, **sizes, init_std=0.5, **options)
    layer = MultiHeadLatentAttention(config, dtype=DTYPE)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(4))
    return layer, lambda x, at: layer(x, rope=rotary(at), absorb=absorb)


def gated_unit(**options: object) -> Case:
    config = GatedAttentionUnit.Config(16, key_dim=8, init_std=0.5, **options)
    layer = GatedAttentionUnit(config, dtype=DTYPE)
    for parameter in layer.parameters():  # gamma and the bias start small
        nn.init.normal_(parameter, std=0.5)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(8))
    return layer, lambda x, at: layer(x, rope=rotary(at))


def differential(**options: object) -> Case:
    config = DifferentialAttention.Config(16, 2, 0, num_kv_heads=1, init_std=0.5, **options)
    layer = DifferentialAttention(config, dtype=DTYPE)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(4))
    return layer, lambda x, at: layer(x, rope=rotary(at))


def transformer_xl() -> Case:
    sizes = {"memory_length": 3, "same_length": True, "init_std": 0.5}
    return block(TransformerXLAttention(TransformerXLAttention.Config(16, 4, **sizes), dtype=DTYPE))


def t5() -> Case:
    config = Attention.Config(16, 4, causal=False, scale=1.0, init_std=0.5)
    layer = nn.ModuleList([Attention(config, dtype=DTYPE)])
    layer.append(T5RelativeBias(T5RelativeBias.Config(4, 8, 6, init_std=1.0), dtype=DTYPE))
    return layer, lambda x, _: layer[0](x, relative=layer[1]())


def deberta() -> Case:
    config = DisentangledAttention.Config(16, 4, max_distance=8, buckets=4, init_std=0.5)
    layer = DisentangledAttention(config, dtype=DTYPE)
    positions = torch.randn(8, 16, dtype=DTYPE)
    return layer, lambda x, _: layer(x, positions)


def multihead(*, cross: bool) -> Case:
    config = MultiheadAttention.Config(16, 4, batch_first=True)
    layer = MultiheadAttention(config, dtype=DTYPE)
    options = {"need_weights": False, "is_causal": not cross}
    return layer, lambda x, _: layer(x, 2 * x if cross else x, x, **options)[0]


def torch_layer() -> Case:
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, dtype=DTYPE)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    return block(layer)


def stack() -> Case:
    mlp, norm = RWKVChannelMix.Config(16), LayerNorm.Config(16)
    layer = DecoderBlock.Config(RWKV6TimeMix.Config(16, head_dim=8), mlp, norm).build(dtype=DTYPE)
    return layer, lambda x, _: sum(layer(x))


def with_functions(config: Any, heads: int) -> Case:
    """With a mask and a score_mod that are functions."""
    functions, table = functions_of_positions(heads)
    layer = nn.ModuleList([config.build(dtype=DTYPE), nn.ParameterList([table])])
    return layer, lambda x, _: layer[0](x, **functions)


def longformer() -> Case:
    """With global tokens of each sequence."""
    config = LongformerAttention.Config(16, 4, window=2, **STD)
    layer, index = config.build(dtype=DTYPE), torch.tensor([[3, 0], [0, -1], [-1, 7]])

    def call(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        own = index if x.is_nested else index[LENGTHS.index(x.shape[1])][None]
        return layer(x, global_index=own)

    return layer, call


CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: recurrent(name) for name in RECURRENT},
    "decoder-block": stack,
    "block-pre": lambda: block(readme_block(RMSNorm, "pre")),
    "block-sandwich": lambda: block(readme_block(RMSNorm, "sandwich")),
    "block-post": lambda: block(readme_block(LayerNorm, "post")),
    "block-parallel": lambda: block(parallel_block()),
    "latent": lambda: latent(absorb=False),
    "latent-absorbed": lambda: latent(absorb=True, separate_kv_latents=True),
    "gated-unit": lambda: gated_unit(),
    "gated-unit-t5": lambda: gated_unit(relative="t5", causal=False),
    "gated-unit-toeplitz": lambda: gated_unit(relative="toeplitz", bias_inside_n=True),
    "gated-unit-softmax": lambda: gated_unit(attention="softmax", relative="t5"),
    "differential": lambda: differential(gqa_map="naive"),
    "differential-hf": lambda: differential(form="hf", window_size=(2, -1)),
    "transformer-xl": transformer_xl,
    "t5": t5,
    "deberta": deberta,
    "multihead": lambda: multihead(cross=False),
    "multihead-cross": lambda: multihead(cross=True),
    "moba": lambda: rotated(MoBA.Config(16, 4, 2, block_size=2, topk=2, **STD)),
    "nsa": lambda: rotated(NSA.Config(16, 4, 2, None, 2, 1, 2, 3, 3, **STD)),
    "nsa-shared": lambda: rotated(
        NSA.Config(16, 4, 1, None, 4, 2, 2, 3, 3, "mean", separate_kv=False, **STD)
    ),
    "dsa": lambda: sparse_latent("sparse"),
    "dsa-dense": lambda: sparse_latent("dense"),
    "select": lambda: rotated(SelectAttention.Config(16, 4, 2, **STD)),
    "selective": lambda: rotated(SelectiveAttention.Config(16, 4, 2, **STD)),
    "parallax": lambda: rotated(ParallaxAttention.Config(16, 4, 2, qk_norm=True, **STD)),
    "multi-token": lambda: rotated(MultiTokenAttention.Config(16, 4, 2, **STD)),
    "csa": lambda: rotated(
        CompressedSparseAttention.Config(
            *(16, 4, 6, 8, 4, 2, 5),
            **{"window": 2, "compress_rate": 2, "index_topk": 2, "index_heads": 5, "index_dim": 6},
            **STD,
        )
    ),
    "routed-blocks": lambda: rotated(
        RoutedBlockAttention.Config(16, 4, 2, block_size=2, topk=2, query_block=2, **STD)
    ),
    "block-sparse": lambda: rotated(BlockSparseAttention.Config(16, 4, 2, block_size=3, **STD)),
    "neighborhood": lambda: rotated(
        NeighborhoodAttention1D.Config(16, 4, kernel_size=3, is_causal=True, **STD)
    ),
    "bigbird": lambda: rotated(BigBirdAttention.Config(16, 4, 2, block=1, n_random=1, **STD)),
    "dual-chunk": lambda: rotated(
        DualChunkAttention.Config(
            *(16, 4, 2), chunk_size=4, local_window=1, train_length=3, mscale="qwen", **STD
        )
    ),
    "hub-spoke": lambda: rotated(
        HubSpokeAttention.Config(16, 4, 2, window=2, global_every=3, dual="disjoint", **STD)
    ),
    "longformer": longformer,
    "functions": lambda: with_functions(Attention.Config(16, 4, 2, **STD), 4),
    "functions-latent": lambda: with_functions(
        MultiHeadLatentAttention.Config(16, 2, 8, 8, 6, 0, 5, **STD), 2
    ),
    "functions-differential": lambda: with_functions(
        DifferentialAttention.Config(16, 2, 0, **STD), 2
    ),
    "functions-gated-unit": lambda: with_functions(
        GatedAttentionUnit.Config(16, key_dim=8, norm_n=9, **STD), 1
    ),
    "torch-layer": torch_layer,
}


@pytest.mark.parametrize("name", CASES)
def test_jagged_input_gives_what_each_sequence_gives_alone(name):
    module, call = CASES[name]()
    rows = sequences()
    x = jagged(rows).detach().requires_grad_()
    positions = [torch.arange(n) for n in LENGTHS]
    y = call(x, torch.cat(positions))
    want = [call(row[None], at)[0] for row, at in zip(rows, positions, strict=True)]
    assert (x + y).shape == x.shape  # the same boundaries
    for a, w in zip(y.unbind(), want, strict=True):
        torch.testing.assert_close(a, w)
    grad = torch.randn_like(y.values())
    parameters = list(module.parameters())
    got = torch.autograd.grad(y.values(), [x, *parameters], grad, allow_unused=True)
    alone = torch.autograd.grad(torch.cat(want), [*rows, *parameters], grad, allow_unused=True)
    torch.testing.assert_close(got[0].values(), torch.cat(alone[: len(rows)]))
    for a, w in zip(got[1:], alone[len(rows) :], strict=True):
        torch.testing.assert_close(a, w)


@pytest.mark.parametrize("known", [True, False], ids=["longest-known", "longest-unknown"])
def test_one_graph_for_jagged_input_of_all_lengths(known):
    torch._dynamo.reset()
    layer = Residual(attention(), Residual.Config(RMSNorm.Config(16)), dtype=DTYPE)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for lengths in ((5, 1, 9), (3, 4, 2, 2), (12, 7)):
        x = jagged([torch.randn(n, 16, dtype=DTYPE) for n in lengths])
        if not known:
            x = torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())
        x.requires_grad_(known)
        got, want = compiled(x).values(), layer(x).values()
        torch.testing.assert_close(got, want)
        if known:
            grads = [torch.autograd.grad(y.square().sum(), x)[0].values() for y in (got, want)]
            torch.testing.assert_close(*grads)
    assert graphs.frame_count == 2  # the first one's sizes are constants


def test_calls_that_no_jagged_input_has():
    x = jagged(sequences())
    layers = {
        "DeltaNet: state must be None": lambda: DeltaNet(16, 2, dtype=DTYPE)(
            x, state=DeltaNet(16, 2, dtype=DTYPE).new_state(3, 9)
        ),
        "state must be None": lambda: latent(absorb=False)[0](
            x, rope=(torch.ones(15, 2), torch.zeros(15, 2)), state=CrossCache()
        ),
        "LongformerAttention: key_padding must be None where x is nested": lambda: longformer()[0](
            x, key_padding=torch.ones(3, 9, dtype=torch.bool)
        ),
        r"NSA: x must have shape \(B, T, 12\)": lambda: NSA(12, 4)(x),
        "memory must be None": lambda: transformer_xl()[0](x, torch.ones(3, 2, 16)),
        "need_weights=True": lambda: multihead(cross=False)[0](x, x, x),
        "the same boundaries": lambda: multihead(cross=True)[0](
            x, x, jagged(sequences()[::-1]), need_weights=False
        ),
    }
    for message, call in layers.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_rows_of_tokens_are_taken():
    layer, x = Dropout(), jagged(sequences())
    strided = torch.nested.nested_tensor(sequences())
    dense = torch.ones(2, 3, 8)
    holes = torch.nested.narrow(
        dense, 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged
    )
    columns = x.transpose(1, 2)
    numbers = jagged([row[:, 0] for row in sequences()])
    for wrong in (strided, holes, columns, numbers):
        with pytest.raises(ValueError, match="dropout: x must be a jagged nested tensor"):
            layer(wrong)
    for name in ("bigbird", "moba", "nsa", "dsa", "csa", "selective", "routed-blocks"):
        layer, call = CASES[name]()
        message = f"{type(layer).__name__}: x must be a jagged nested tensor"
        with pytest.raises(ValueError, match=message):
            call(strided, torch.arange(15))
