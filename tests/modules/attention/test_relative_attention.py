"""T5, Transformer-XL, DeBERTa and the gated attention unit against their definitions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from layer_checks import assert_same_gradients
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention

from omniattn.modules import (
    Attention,
    DisentangledAttention,
    GatedAttentionUnit,
    RotaryEmbedding,
    T5RelativeBias,
    TransformerXLAttention,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_same(actual, expected, inputs) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(actual, expected, *inputs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_attention_is_that_of_transformers(decoder):
    config = transformers.T5Config(
        d_model=24,
        d_kv=6,
        num_heads=4,
        is_decoder=decoder,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
    config._attn_implementation = "eager"
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    layer = Attention(Attention.Config(24, 4, causal=decoder, scale=1.0))
    state = {f"{n}_proj.weight": getattr(theirs, n).weight for n in "qkvo"}
    layer.load_state_dict(state)
    bias = T5RelativeBias(T5RelativeBias.Config(4, 8, 20, bidirectional=not decoder))
    bias.load_state_dict(theirs.relative_attention_bias.state_dict())
    x = torch.randn(2, 31, 24)
    hidden = torch.ones(31, 31).triu(1) * (-1e30 if decoder else 0)
    expected = theirs(x, mask=hidden[None, None])[0]
    tables = [bias.weight], [theirs.relative_attention_bias.weight]
    assert_same(layer(x, relative=bias()), expected, tables)
    if decoder:
        with torch.no_grad():
            cache = layer.new_state(2, 31)
            parts = [
                layer(x[:, a:b], state=cache, relative=bias())
                for a, b in ((0, 20), (20, 21), (21, 30), (30, 31))
            ]
        torch.testing.assert_close(torch.cat(parts, 1), expected.detach(), rtol=1e-4, atol=1e-4)


def xl_by_hand(layer: TransformerXLAttention, x: torch.Tensor, memory) -> torch.Tensor:
    """Score by score."""
    c = layer.config
    source = x if memory is None else torch.cat([memory, x], 1)
    past = source.shape[1] - x.shape[1]
    w_q, w_k, w_v = layer.qkv_net.weight.chunk(3)
    q, k, v = (
        (t @ w.T).unflatten(-1, (c.num_heads, -1))
        for t, w in ((x, w_q), (source, w_k), (source, w_v))
    )
    half = torch.arange(0, c.dim, 2, dtype=x.dtype)
    outs = []
    for i in range(x.shape[1]):
        keys = range(max(0, i + past - c.memory_length + 1) if c.same_length else 0, i + past + 1)
        scores = []
        for j in keys:
            distance = i + past - j
            if c.clamp_length >= 0:
                distance = min(distance, c.clamp_length)
            angle = distance / 10000 ** (half / c.dim)
            r = layer.r_net(torch.cat([angle.sin(), angle.cos()])).unflatten(-1, (c.num_heads, -1))
            content = ((q[:, i] + layer.r_w_bias) * k[:, j]).sum(-1)
            scores.append((content + ((q[:, i] + layer.r_r_bias) * r).sum(-1)) / c.head_size**0.5)
        p = torch.stack(scores, -1).softmax(-1)
        outs.append(torch.einsum("bhk,bkhd->bhd", p, v[:, keys.start : keys.stop]).flatten(1))
    return layer.o_net(torch.stack(outs, 1))


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"clamp_length": 3}])
@pytest.mark.parametrize("segments", [1, 2])
def test_transformer_xl_is_its_definition(options, segments):
    config = TransformerXLAttention.Config(8, 2, memory_length=6, init_std=0.5, **options)
    layer = TransformerXLAttention(config, dtype=torch.float64)
    memory = None
    for _ in range(segments):
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        actual, expected = layer(x, memory), xl_by_hand(layer, x, memory)
        inputs = [x, *layer.parameters()]
        assert_same(actual, expected, (inputs, inputs))
        memory = layer.next_memory(x, memory)
    assert memory.shape[1] == min(5 * segments, 6)
    assert not memory.requires_grad
    assert torch.equal(memory[:, -5:], x)


@pytest.mark.parametrize("terms", ["c2p|p2c", "c2p", "p2c"])
@pytest.mark.parametrize("buckets", [0, 8])
@pytest.mark.parametrize("share", [True, False])
def test_disentangled_attention_is_that_of_deberta(terms, buckets, share):
    types = terms.split("|")
    theirs = DisentangledSelfAttention(
        transformers.DebertaV2Config(
            hidden_size=24,
            num_attention_heads=4,
            relative_attention=True,
            max_relative_positions=12,
            position_buckets=buckets or -1,
            pos_att_type=types,
            share_att_key=share,
        )
    ).eval()
    config = DisentangledAttention.Config(
        24,
        4,
        max_distance=12,
        buckets=buckets,
        content_to_position="c2p" in types,
        position_to_content="p2c" in types,
        share_projections=share,
        clamp_distance=False,
    )
    ours = DisentangledAttention(config)
    ours.load_state_dict(theirs.state_dict(), strict=len(types) == 2 or share)
    x = torch.randn(2, 19, 24, requires_grad=True)
    positions = torch.randn(2 * config.span, 24, requires_grad=True)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[1, 15:] = False
    expected = theirs(x, real[:, None, None], rel_embeddings=positions)[0]
    actual = ours(x, positions, mask=real[:, None, None])
    assert_same(actual, expected, ([x, positions], [x, positions]))
    # Microsoft's clamp only matters beyond max_distance.
    clamped = DisentangledAttention(replace(config, clamp_distance=True))
    clamped.load_state_dict(ours.state_dict())
    torch.testing.assert_close(clamped(x[:, :12], positions), ours(x[:, :12], positions))
    with pytest.raises(ValueError, match="positions must have shape"):
        ours(x, positions[:-1])
    other = torch.randn(2, 19, 24)
    crossed = {"rel_embeddings": positions, "query_states": x}
    expected = theirs(other, real[:, None, None], **crossed)[0]
    actual = ours(x, positions, mask=real[:, None, None], context=other)
    torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="context must have the shape of x, got context"):
        ours(x, positions, context=other[:, 1:])
    projected = DisentangledAttention(replace(config, out_proj=True, key_bias=False))
    projected.load_state_dict(ours.state_dict(), strict=False)
    assert projected.key_proj.bias is None
    with torch.no_grad():
        ours.key_proj.bias.zero_()
        if not share:
            ours.pos_key_proj.bias.zero_()
    torch.testing.assert_close(projected(x, positions), projected.o_proj(ours(x, positions)))


def results(layer, inputs, **options):
    """Output, gradients and second derivatives."""
    leaves = [*inputs, *layer.parameters()]
    torch.manual_seed(7)  # of dropout
    out = layer(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    first = torch.autograd.grad((out * weights).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return out, *first, *second


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"same_length": True},
        {"buckets": 8},
        {"p2c_index": "paper", "content_to_position": False},
    ],
    ids=str,
)
def test_terms_are_those_of_the_definition(options, dropout_p):
    if options.keys() & {"buckets", "p2c_index"}:
        config = DisentangledAttention.Config(8, 2, 9, dropout_p=dropout_p, **options)
        inputs = torch.randn(2, 33, 8).double(), torch.randn(2 * config.span, 8).double()
    else:
        config = TransformerXLAttention.Config(
            8, 2, memory_length=11, dropout_p=dropout_p, **options
        )
        inputs = torch.randn(2, 33, 8).double(), torch.randn(2, 11, 8).double()
    layer = config.build(dtype=torch.float64).train()
    eager = replace(config, backend="reference").build(dtype=torch.float64).train()
    eager.load_state_dict(layer.state_dict())
    inputs = [t.requires_grad_() for t in inputs]
    mask = torch.rand(2, 1, 33, 44 if inputs[1].dim() == 3 else 33) < 0.8
    want = results(eager, inputs, mask=mask)
    torch.testing.assert_close(results(layer, inputs, mask=mask), want)


class WithPositions(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = DisentangledAttention(config).eval()
        self.positions = torch.nn.Parameter(torch.randn(2 * config.span, 8))

    def forward(self, x):
        return self.layer(x, self.positions)


def test_memory_of_terms_grows_with_the_length():
    """A number for each of 1500^2 pairs and 2 heads would take 18 MB."""
    for layer in (
        TransformerXLAttention(TransformerXLAttention.Config(8, 2)),
        WithPositions(DisentangledAttention.Config(8, 2, max_distance=64)),
    ):
        x = torch.randn(1, 1500, 8)
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(x).sum().backward()
        taken = [event.self_cpu_memory_usage for event in profile.key_averages()]
        assert 0 < sum(n for n in taken if n > 0) < 8e6


@pytest.mark.parametrize("run", ["compile", "grad", "export"])
@pytest.mark.parametrize("name", ["xl", "deberta"])
def test_terms_are_transformed(name, run):
    if name == "xl":
        layer = TransformerXLAttention(TransformerXLAttention.Config(8, 2)).eval()
    else:
        layer = WithPositions(DisentangledAttention.Config(8, 2, max_distance=9, buckets=6))
    x = torch.randn(2, 21, 8, requires_grad=True)
    want = layer(x)
    (grad,) = torch.autograd.grad(want.square().sum(), x)
    if run == "export":
        lengths = ({1: torch.export.Dim("tokens", min=2, max=1000)},)
        program = torch.export.export(layer, (x.detach(),), dynamic_shapes=lengths).module()
        for t in (x.detach(), torch.randn(2, 40, 8)):
            torch.testing.assert_close(program(t), layer(t))
    elif run == "grad":
        got = torch.func.grad(lambda t: layer(t).square().sum())(x.detach())
        torch.testing.assert_close(got, grad)
    else:
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], grad)


@pytest.mark.parametrize("p2c_index", ["code", "paper"])
def test_disentangled_attention_reads_positions_where_the_paper_or_the_code_does(p2c_index):
    options = {"clamp_distance": False, "p2c_index": p2c_index}
    config = DisentangledAttention.Config(6, 1, max_distance=4, init_std=0.5, **options)
    layer = DisentangledAttention(config, dtype=torch.float64)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.query_proj(x), layer.key_proj(x), layer.value_proj(x)
    qr, kr = layer.query_proj(positions), layer.key_proj(positions)

    def score(i, j):
        delta = min(max(i - j + 4, 0), 7)
        p2c = delta if p2c_index == "code" else min(max(j - i + 4, 0), 7)
        return (q[i] @ k[j] + q[i] @ kr[delta] + k[j] @ qr[p2c]) / 18**0.5

    scores = torch.stack([torch.stack([score(i, j) for j in range(7)]) for i in range(7)])
    expected = scores.softmax(-1) @ v
    assert_same(layer(x[None], positions)[0], expected, ([x, positions], [x, positions]))


def test_disentangled_attention_knows_its_indices():
    with pytest.raises(ValueError, match="must be one of code, paper, got p2c_index='v2'"):
        DisentangledAttention.Config(6, 1, p2c_index="v2")


@pytest.mark.parametrize("attention", ["relu2", "softmax"])
@pytest.mark.parametrize("relative", [None, "t5", "toeplitz"])
@pytest.mark.parametrize("options", [{}, {"norm_n": 20, "causal": False, "bias_inside_n": True}])
def test_gated_attention_unit_is_its_definition(attention, relative, options):
    config = GatedAttentionUnit.Config(
        10, key_dim=6, attention=attention, relative=relative, init_std=0.5, **options
    )
    layer = GatedAttentionUnit(config, dtype=torch.float64)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 9, 10, dtype=torch.float64, requires_grad=True)
    u, v, z = (F.silu(F.linear(x, p.weight)) for p in (layer.u_proj, layer.v_proj, layer.z_proj))
    q, k = z * layer.gamma[0] + layer.beta[0], z * layer.gamma[1] + layer.beta[1]
    distance = torch.arange(9) - torch.arange(9)[:, None]
    bias = 0.0
    if relative == "toeplitz":
        bias = layer.relative_bias[distance + 511, 0]
    elif relative == "t5":  # all distances here have a bucket of their own, but in encoders 8
        far = -distance if config.causal else distance.abs() + 16 * (distance > 0)
        bias = layer.relative_bias[far.clamp(min=0), 0]
    n = config.norm_n or 9
    scores = q @ k.transpose(1, 2)
    if attention == "softmax":
        scores = scores / 6**0.5 + bias
    elif config.bias_inside_n:
        scores = (scores + 10**0.5 * bias) / n
    else:
        scores = scores / n + bias
    hidden = torch.ones(9, 9).triu(1).bool() & config.causal
    if attention == "relu2":
        weights = scores.relu().square().masked_fill(hidden, 0)
    else:
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    inputs = [x, *layer.parameters()]
    assert_same(layer(x), F.linear(u * (weights @ v), layer.o_proj.weight), (inputs, inputs))


def test_layers_of_transformer_xl_share_u_and_v():
    config = TransformerXLAttention.Config(8, 2, init_std=0.5)
    first = TransformerXLAttention(config, dtype=torch.float64)
    u, v = first.r_w_bias, first.r_r_bias
    before = u.clone()
    second = TransformerXLAttention(config, biases=(u, v), dtype=torch.float64)
    assert torch.equal(u, before)
    stack = torch.nn.Sequential(first, second)
    assert sum(p.numel() for p in stack.parameters()) == 2 * 5 * 64 + 2 * 8
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(second(x), xl_by_hand(second, x, None))
    shared = torch.autograd.grad(stack(x).sum(), u)[0]
    alone = TransformerXLAttention(config, dtype=torch.float64)
    alone.load_state_dict(second.state_dict())
    parts = torch.autograd.grad(alone(first(x)).sum(), (u, alone.r_w_bias))
    torch.testing.assert_close(shared, sum(parts))
    with pytest.raises(ValueError, match=r"XLAttention: biases\[1\] must have shape \(2, 4\)"):
        TransformerXLAttention(config, biases=(u, torch.nn.Parameter(torch.zeros(3, 4))))
    for wrong in (u, (u,), (u, u.detach()), 3):
        with pytest.raises(TypeError, match=r"XLAttention: biases must be a pair of torch.nn.Para"):
            TransformerXLAttention(config, biases=wrong)


def test_transformer_xl_names_the_wrong_argument():
    layer, x = TransformerXLAttention(TransformerXLAttention.Config(8, 2)), torch.ones(2, 3, 8)
    nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    for shape in ((8,), (3, 8), (1, 2, 3, 8), (2, 3, 6)):
        for call in (layer, lambda x: layer.next_memory(x, None)):
            with pytest.raises(ValueError, match=r"XLAttention: x must have shape \(B, T, 8\)"):
                call(torch.ones(shape))
    for call in (layer, layer.next_memory):
        for memory in (torch.ones(3, 8), torch.ones(1, 3, 8), torch.ones(2, 3, 6), nested):
            with pytest.raises(ValueError, match=r"memory must have shape \(2, M, 8\), got memory"):
                call(x, memory)
        for memory in (3, "a", x.double(), x.long()):
            with pytest.raises(
                TypeError, match=r"XLAttention: memory must (be a torch|have the d)"
            ):
                call(x, memory)
        with pytest.raises(ValueError, match="XLAttention: memory must be on the device of x"):
            call(x, x.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, x.bfloat16()).shape == x.shape
        with pytest.raises(TypeError, match="memory must have the dtype of x"):
            layer(x, x.double())
    for sizes, got in (
        ({"dim": 9, "num_heads": 2}, "dim must be a multiple of num_heads"),
        ({"dim": 9, "num_heads": 3}, "dim must be even"),
        ({"dim": 8, "num_heads": 2, "clamp_length": -2}, "clamp_length must be"),
    ):
        with pytest.raises(ValueError, match=f"^TransformerXLAttention: {got}"):
            TransformerXLAttention.Config(**sizes)


def test_transformer_xl_without_tokens_and_of_a_leaf():
    layer = TransformerXLAttention(TransformerXLAttention.Config(8, 2))
    empty = torch.ones(2, 0, 8)
    assert layer(empty).shape == empty.shape
    nested = torch.nested.nested_tensor([empty[0], empty[1]], layout=torch.jagged)
    assert layer(nested).values().shape == (0, 8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, state=layer.new_state(2, 3)), layer(x))


@pytest.mark.parametrize("relative", [None, "t5", "toeplitz"])
@torch.no_grad()
def test_gated_attention_unit_decodes(relative):
    config = GatedAttentionUnit.Config(8, key_dim=4, relative=relative, norm_n=16)
    layer = GatedAttentionUnit(config, dtype=torch.float64)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    cache = layer.new_state(2, 11)
    assert cache.nbytes == 2 * 11 * (4 + 16) * 8
    parts = [layer(x[:, a:b], state=cache) for a, b in ((0, 5), (5, 6), (6, 10), (10, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    with pytest.raises(ValueError, match="norm_n=None"):
        GatedAttentionUnit(replace(config, norm_n=None)).new_state(1, 1)


def test_gated_attention_unit_turns_its_shared_projection():
    layer = GatedAttentionUnit(GatedAttentionUnit.Config(8, key_dim=4, relative="toeplitz"))
    x = torch.randn(1, 5, 8)
    rope = RotaryEmbedding(RotaryEmbedding.Config(4))(torch.arange(5))
    torch.nn.init.normal_(layer.gamma)
    assert not torch.allclose(layer(x, rope=rope), layer(x), atol=1e-9, rtol=1e-3)
    with pytest.raises(ValueError, match="keys=513"):
        layer(torch.zeros(1, 513, 8))
    with pytest.raises(ValueError, match="'sigmoid'"):
        GatedAttentionUnit.Config(8, attention="sigmoid")
