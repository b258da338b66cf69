"""The drop-in for torch.nn.MultiheadAttention against torch's own."""

import copy

import pytest
import torch
from torch import nn

from omniattn.modules import MultiheadAttention


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CASES = {
    "plain": ({}, {}),
    "batch-first": ({"batch_first": True}, {}),
    "no-bias": ({"bias": False}, {}),
    "key-value-dims": ({"kdim": 6, "vdim": 10}, {}),
    "extra-keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"padding": True, "mask": "bool"}),
    "padding": ({}, {"padding": True}),
    "bool-mask": ({}, {"mask": "bool", "padding": True}),
    "float-mask": ({}, {"mask": "float"}),
    "float-mask-and-padding": ({}, {"mask": "float", "padding": "float"}),
    "head-mask": ({}, {"mask": "heads"}),
    "per-head-weights": ({}, {"average_attn_weights": False}),
    "no-weights": ({}, {"need_weights": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name):
    arguments, options = CASES[name]
    theirs = nn.MultiheadAttention(8, 2, **arguments, dtype=torch.float64)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    ours = MultiheadAttention.from_torch(theirs)
    sizes = 8, arguments.get("kdim", 8), arguments.get("vdim", 8)
    query, key, value = (
        torch.randn(n, 3, d, dtype=torch.float64, requires_grad=True)
        for n, d in zip((5, 7, 7), sizes, strict=True)
    )
    call = {k: v for k, v in options.items() if k not in ("padding", "mask")}
    if options.get("padding"):
        call["key_padding_mask"] = torch.zeros(3, 7, dtype=torch.bool)
        call["key_padding_mask"][1, 5:] = True
        if options["padding"] == "float":
            call["key_padding_mask"] = torch.randn(3, 7, dtype=torch.float64)
    if "mask" in options:
        call["attn_mask"] = {
            "bool": torch.ones(5, 7).triu(2).bool(),
            "float": torch.randn(5, 7, dtype=torch.float64),
            "heads": torch.randn(6, 5, 7) > 1,
        }[options["mask"]]
    inputs = [query, key, value]
    given = [x.transpose(0, 1) for x in inputs] if arguments.get("batch_first") else inputs
    expected, expected_weights = theirs(*given, **call)
    actual, weights = ours(*given, **call)
    torch.testing.assert_close(actual, expected)
    if expected_weights is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, expected_weights)
    grad = torch.randn_like(actual)
    for (a_name, a), e in zip(
        [("input", x) for x in inputs] + list(ours.named_parameters()),
        [*inputs, *(dict(theirs.named_parameters())[n] for n, _ in ours.named_parameters())],
        strict=True,
    ):
        torch.testing.assert_close(
            torch.autograd.grad(actual, a, grad, retain_graph=True)[0],
            torch.autograd.grad(expected, e, grad, retain_graph=True)[0],
            msg=lambda text, n=a_name: f"{n}: {text}",
        )


def test_self_attention_unbatched_and_causal():
    theirs = nn.MultiheadAttention(8, 2)
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(6, 8)
    hidden = torch.ones(6, 6).triu(1).bool()
    expected, expected_weights = theirs(x, x, x, attn_mask=hidden)
    for call in ({"attn_mask": hidden}, {"is_causal": True}):
        actual, weights = ours(x, x, x, **call)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("batch_first", [False, True])
def test_serves_the_transformer_layers_of_torch(batch_first):
    sizes = {"nhead": 2, "dim_feedforward": 12, "batch_first": batch_first}
    layer = nn.TransformerEncoderLayer(8, **sizes)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ours = copy.deepcopy(theirs)
    calls = []
    for layer in ours.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 3, 8)
    padding = torch.tensor([[False, False, True]]).expand(3, 3)
    with torch.no_grad():  # where torch would take its own fused layer
        expected = theirs(x, src_key_padding_mask=padding)
        actual = ours(x, src_key_padding_mask=padding)
    real = (slice(None), slice(2)) if batch_first else (slice(2),)
    torch.testing.assert_close(actual[real], expected[real])
    assert len(calls) == 2


def test_a_query_without_keys_gives_the_bias_of_the_projection():
    layer = MultiheadAttention(MultiheadAttention.Config(8, 2, batch_first=True))
    x = torch.randn(2, 3, 8)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True
    out, weights = layer(x, x, x, key_padding_mask=padding)
    assert torch.equal(out[1], layer.out_proj.bias.expand(3, 8))
    assert not weights[1].any()


def test_names_what_is_wrong():
    layer = MultiheadAttention(MultiheadAttention.Config(8, 2, add_zero_attn=True))
    x = torch.randn(3, 1, 8)
    with pytest.raises(NotImplementedError, match="add_zero_attn"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        layer(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="embed_dim=9"):
        MultiheadAttention.Config(9, 2)
