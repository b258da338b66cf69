"""Functions of jagged nested tensors equal themselves on each sequence alone."""

import pytest
import torch

from omniattn import functional as F

LENGTHS = (5, 1, 9)
KEYS = (7, 2, 4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def jagged(*size: int, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    rows = [torch.randn(n, *size, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def like(x: torch.Tensor, *size: int) -> torch.Tensor:
    values = torch.randn(len(x.values()), *size, dtype=x.dtype, requires_grad=True)
    return torch.nested.nested_tensor_from_jagged(values, x.offsets())


weight, bias = torch.randn(2, 8, dtype=torch.float64)
up, gate = torch.randn(2, 12, 8, dtype=torch.float64)
seed = torch.tensor([1, 2])

TOKEN_WISE = {
    "rms_norm": lambda x: F.rms_norm(x, weight),
    "rms_norm-residual": lambda x: F.rms_norm(x, weight, residual=2 * x),
    "layer_norm": lambda x: F.layer_norm(x, weight, bias),
    "layer_norm-residual": lambda x: F.layer_norm(x, residual=x),
    "group_norm": lambda x: F.group_norm(x, 2, weight),
    "rms_norm_gated": lambda x: F.rms_norm_gated(x, 2 * x, weight),
    "mlp": lambda x: F.mlp(x, up, gate.T, up_bias=up[:, 0]),
    "glu_mlp": lambda x: F.glu_mlp(x=x, gate_weight=gate, up_weight=up, down_weight=up.T),
    "swiglu": lambda x: F.swiglu(x, 2 * x),
    "swiglu-packed": lambda x: F.swiglu(x),
    "geglu": lambda x: F.geglu(x, up=x),
    "reglu": lambda x: F.reglu(x),
    "bilinear": lambda x: F.bilinear(x, x),
    "glu": lambda x: F.glu(gate=x),
}


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_what_treats_each_token_alone(name):
    call, x = TOKEN_WISE[name], jagged(8)
    got, want = call(x), call(x.values())
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for y, w in pairs:
        assert y.shape[:2] == x.shape[:2]
        assert torch.equal(y.values(), w)
    total = sum(y.values().sum() for y in (got if isinstance(got, tuple) else (got,)))
    assert torch.autograd.grad(total, x)[0].shape == x.shape


def test_dropout_draws_the_bits_of_the_values():
    x = jagged(8)
    assert torch.equal(F.dropout(x, seed=seed).values(), F.dropout(x.values(), seed=seed))
    assert torch.equal(F.dropout(x, training=False).values(), x.values())


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_tables_have_a_row_for_each_token_of_all_sequences(normed):
    q, positions = jagged(4, 8), torch.cat([torch.arange(n) for n in LENGTHS])
    k = like(q, 2, 8)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), positions, torch.float64)
    norms = {"q_weight": weight, "k_weight": bias} if normed else {}
    rotate = F.qk_norm_rotary if normed else F.apply_rotary
    got = rotate(q, k, cos, sin, **norms)
    want = rotate(q.values()[None], k.values()[None], cos, sin, **norms)
    for y, w, x in zip(got, want, (q, k), strict=True):
        assert y.shape == x.shape
        assert torch.equal(y.values(), w[0])
    assert F.apply_rotary(q, None, cos, sin)[1] is None
    with pytest.raises(ValueError, match="k must be jagged with the boundaries of q"):
        rotate(q, jagged(2, 8, lengths=KEYS), cos, sin, **norms)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_attention_of_each_sequence_alone(cross, options):
    q, k = jagged(4, 8), jagged(2, 8, lengths=KEYS if cross else LENGTHS)
    v = like(k, 2, 6)
    out, lse = F.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out.values(), F.attention(q, k, v, **options).values())
    assert out.shape == (3, q.shape[1], 4, 6)
    assert lse.shape == (3, 4, q.shape[1])
    rows = zip(q.unbind(), k.unbind(), v.unbind(), out.unbind(), lse.unbind(), strict=True)
    for a, b, c, o, s in rows:
        want, want_lse = F.attention(a[None], b[None], c[None], return_lse=True, **options)
        torch.testing.assert_close(o, want[0])
        torch.testing.assert_close(s, want_lse[0])
    grads = torch.autograd.grad(out.values().sum(), (q, k))
    assert [g.shape for g in grads] == [q.shape, k.shape]


def test_attention_names_what_is_not_jagged():
    q = jagged(4, 8)
    with pytest.raises(ValueError, match="attention: k must be a jagged nested tensor"):
        F.attention(q, q.values()[None], q)
    with pytest.raises(ValueError, match="attention: k and v must have the same boundaries"):
        F.attention(q, q, jagged(4, 8, lengths=KEYS))


def test_one_graph_for_all_lengths():
    torch._dynamo.reset()

    def block(x):
        x, _ = F.rms_norm(x, weight, residual=x)
        heads = x.unflatten(-1, (2, 4))
        return F.attention(heads, heads, heads, causal=True)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (LENGTHS, KEYS):
        x = jagged(8, lengths=lengths)
        torch.testing.assert_close(compiled(x).values(), block(x).values())
