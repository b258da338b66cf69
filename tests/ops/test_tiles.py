"""Effects of AMX tiles beyond the OpSpecs: fp32 in pieces of bf16, and sizes of engines that only
tiles use. test_emulated_isas.py runs this file on software tiles. Elsewhere the switches of pieces
change nothing, and these tests show that."""

import math
import re
from functools import partial

import pytest
import torch
from tile_cases import ON_TILES, by_experts, experts, gradients

from omniattn import config, reference, testing
from omniattn.functional import (
    attention,
    glu_mlp,
    linear,
    linear_cross_entropy,
    mlp,
)
from omniattn.ops import gemm as ops
from omniattn.ops.dispatch import precision as _precision
from omniattn.testing.properties import PROPERTIES
from omniattn.testing.specs.attention.attention import qkv

UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def fp32():
    """Leaves torch's switch as it was."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def inputs(m=37, n=70, k=130, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (n, k), (n,))]


def use(switch, monkeypatch):
    if switch == "high":
        torch.set_float32_matmul_precision("high")
    elif switch == "tf32":
        monkeypatch.setattr(torch.backends.mkldnn.matmul, "fp32_precision", "tf32", raising=False)
    elif switch == "ours":
        monkeypatch.setattr(config, "FP32_PIECES", 3)


@pytest.mark.parametrize(
    ("switch", "pieces"), [("high", 2), ("ours", 3), ("medium", 0), ("highest", 0)]
)
def test_switches_choose_the_number_of_pieces(switch, pieces, monkeypatch):
    use(switch, monkeypatch)
    if switch == "medium":
        torch.set_float32_matmul_precision("medium")
    x, weight, bias = inputs()
    expected = pieces if ON_TILES else 0
    assert _precision.split_bf16_of(x) == expected
    assert _precision.split_bf16_of(x.bfloat16()) == _precision.split_bf16_of(x.to("meta")) == 0
    assert torch.equal(
        linear(x, weight, bias, backend="cpu"), ops.linear(x, weight, bias, expected)
    )


@pytest.mark.parametrize("value", [2, 3.0, False, "3"], ids=repr)
def test_a_number_of_pieces_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setattr(config, "FP32_PIECES", value)
    message = re.escape(f"FP32_PIECES must be 0 or 3, got FP32_PIECES={value!r}")
    with pytest.raises(ValueError, match=message):
        linear(*inputs())


def test_torchs_switch_for_its_backend_is_followed():
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        assert _precision.split_bf16_of(torch.ones(1)) == (2 if ON_TILES else 0)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def errors(found, exact, size):
    return float(((found - exact).abs() / size).max()) / UNIT


@pytest.mark.parametrize(("switch", "limit"), [("high", 3 * 2.0**8), ("ours", 4.0)])
def test_results_and_gradients_have_the_promised_error(switch, limit, monkeypatch):
    """The bound adds the error of torch's fp32 product to the products that pieces leave out."""
    x, weight, bias = inputs(300, 200, 500)
    grad = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    plain = run(linear, x, weight, bias, grad)
    use(switch, monkeypatch)
    found = run(linear, x, weight, bias, grad)
    doubles = [t.double() for t in (x, weight, bias, grad)]
    exact = run(reference.linear, *doubles)
    sizes = run(reference.linear, *(t.abs() for t in doubles))
    for ours, theirs, right, size in zip(found, plain, exact, sizes, strict=True):
        assert errors(ours, right, size) <= 2 * errors(theirs, right, size) + limit
    assert torch.equal(found[0], plain[0]) is not ON_TILES


def run(function, x, weight, bias, grad, **options):
    """y and the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("switch", ["high", "ours"])
def test_the_backward_repeats_the_pieces_of_the_forward(switch, monkeypatch):
    """Whatever the switch says by then."""
    x, weight, bias = inputs()
    grad = torch.ones(len(x), len(weight))
    use(switch, monkeypatch)
    expected = run(linear, x, weight, bias, grad)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(config, "FP32_PIECES", 0)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, grad), expected[1:], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["x", "weight"])
def test_products_of_what_is_not_finite_are_those_of_fp32(name, value, pieces):
    """In every bit; the gradient of the same tensor is a product of others."""
    results = []
    for n in (pieces, 0):
        x, weight, bias = inputs()
        (x if name == "x" else weight)[3, 5] = value
        grad = torch.ones(len(x), len(weight))
        y, dx, dweight, _ = run(
            lambda *tensors, n=n: ops.linear(*tensors, n), x, weight, bias, grad
        )
        results.append((y, dweight if name == "x" else dx))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("switch", ["high", "ours"])
def test_pieces_do_not_depend_on_the_number_of_threads(switch, monkeypatch):
    use(switch, monkeypatch)
    x, weight, bias = inputs(230, 300, 150)
    grad = torch.randn(230, 300, generator=torch.Generator().manual_seed(1))
    results = []
    for count in (1, 3):
        with testing.threads(count):
            results.append(run(linear, x, weight, bias, grad, backend="cpu"))
            results[-1] += gradients(by_experts, *experts())
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


def test_few_rows_are_streamed_in_fp32(monkeypatch):
    use("ours", monkeypatch)
    x, weight, bias = inputs(m=4)
    assert torch.equal(linear(x, weight, bias, backend="cpu"), ops.linear(x, weight, bias, 0))


def test_feed_forward_layers_use_pieces(monkeypatch):
    """As their products one by one, forward and backward."""
    use("high", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down = (
        torch.randn(s, generator=generator).requires_grad_()
        for s in ((20, 48), (96, 48), (96, 48), (40, 96))
    )

    def by_hand(gated):
        hidden = torch.relu(linear(x, gate, backend="cpu"))
        if gated:
            hidden = hidden * linear(x, up, backend="cpu")
        return linear(hidden, down, backend="cpu")

    for y, expected, leaves in [
        (glu_mlp(x, gate, up, down, activation="relu", backend="cpu"), by_hand(True), (gate, up)),
        (mlp(x, gate, down, activation="relu", backend="cpu"), by_hand(False), (gate, down)),
    ]:
        assert torch.equal(y, expected)
        grads = torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)


def test_compiled_code_follows_the_switches(monkeypatch):
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    tensors = [t.requires_grad_() for t in inputs()]
    for switch in ("highest", "high", "ours"):
        torch.set_float32_matmul_precision("highest")
        use(switch, monkeypatch)
        results = []
        for function in (compiled, linear):
            y = function(*tensors)
            results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


# Experts in pieces.


def by_linear(x, up, up_bias, down, down_bias, index):
    """Computes the experts that have many tokens; rows of the others are 0."""
    y = torch.zeros_like(x)
    for e in (0, 1):
        rows = (index[:, 0] == e).nonzero()[:, 0]
        hidden = torch.relu(linear(x[rows], up[e], up_bias[e], backend="cpu"))
        y = y.index_put((rows,), linear(hidden, down[e], down_bias[e], backend="cpu"))
    return y


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("switch", ["high", "ours"])
def test_experts_use_pieces_as_linear_does(switch, transposed, recompute, monkeypatch):
    """In every bit, forward and backward; four tokens stay in fp32."""
    tensors, index = experts(transposed)
    plain = gradients(by_experts, tensors, index)
    use(switch, monkeypatch)
    found = gradients(by_experts, tensors, index, recompute=recompute)
    expected = gradients(by_linear, tensors, index)
    many = index[:, 0] < 2
    for ours, by_hand, fp32 in zip(found, expected, plain, strict=True):
        chosen = many if len(ours) == 40 else [True, True, False]
        if not ON_TILES:
            assert torch.equal(ours, fp32)
        else:
            assert not torch.equal(ours[chosen], fp32[chosen])
            # The gradients of transposed weights have their factors the other way round.
            if not (transposed and ours.dim() == 3):
                assert torch.equal(ours[chosen], by_hand[chosen])
    assert torch.equal(found[0][~many], plain[0][~many])


@pytest.mark.parametrize("check", ["forward", "backward"])
def test_experts_in_three_pieces_have_the_errors_of_fp32(check, monkeypatch):
    """With gates in all places, weighed inputs, and sizes of 0."""
    use("ours", monkeypatch)
    spec = testing.registry()["moe_experts"]
    kinds = "gptoss", "recompute", "interleaved", "all", "inputs", "noslots", "nofeatures", "nodim"
    for case in spec.cases:
        if case.name.split("-")[0] not in kinds:
            continue
        PROPERTIES[check](spec, case, torch.float32)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 3], ids=["x", "up", "down"])
@pytest.mark.parametrize("switch", ["high", "ours"])
def test_experts_whose_products_are_not_finite_are_those_of_fp32(switch, place, value, monkeypatch):
    """In every bit; the other experts keep their pieces."""
    tensors, index = experts()
    whole = by_experts(*tensors, index)
    with_value = [t.clone() for t in tensors]
    with_value[place].view(-1)[3] = value  # of expert 0
    plain = by_experts(*with_value, index)
    use(switch, monkeypatch)
    found, pieces = by_experts(*with_value, index), by_experts(*tensors, index)
    first, second = (index[:, 0] == e for e in (0, 1))
    if place < 3:  # the second product of the expert is not finite either
        torch.testing.assert_close(found[first], plain[first], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[first].isfinite(), plain[first].isfinite())
    assert torch.equal(found[second], pieces[second])
    assert torch.equal(pieces[second], whole[second]) is not ON_TILES


@pytest.mark.parametrize("switch", ["high", "ours"])
def test_experts_keep_the_digits_of_small_numbers(switch, monkeypatch):
    use(switch, monkeypatch)
    (x, up, _, down, _), index = experts()
    small = by_experts(x * 2.0**-115, up, None, down, None, index)
    assert torch.equal(small, by_experts(x, up, None, down, None, index) * 2.0**-115)


@pytest.mark.parametrize("pieces", [-1, 1, 4])
def test_other_numbers_of_pieces_are_refused(pieces):
    x, weight, _ = inputs()
    message = f"split_bf16 must be 0, 2 or 3, got {pieces}"
    (rows, up, _, down, _), index = experts()
    routed = (rows, index, torch.ones(index.shape), up, None, down, None)
    for call in (
        lambda: torch.ops.omniattn.moe(*routed, 0, 0, [], False, pieces, False),
        lambda: torch.ops.omniattn.linear(x, weight, None, pieces),
        lambda: torch.ops.omniattn.linear_backward(x @ weight.T, x, weight, pieces, *[True] * 3),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


# Sizes and errors of bf16.


@pytest.mark.parametrize("check", ["forward", "backward"])
def test_prefill_of_latent_attention(check):
    """Keys of 192 features and values of 128."""
    case = qkv("latent", 1, 130, 130, 2, 2, 192, 128, causal=True)
    PROPERTIES[check](testing.registry()["attention"], case, torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("attention_weights", {"causal": True}),
        ("attention_weights", {"causal": True, "softcap": 3.0, "column_sums": True}),
        ("attention_weights", {"window_size": (70, 3), "column_sums": True}),
        ("attention_weights", {"causal": True, "group_sums": True}),
        ("select_attention", {"causal": True}),
        ("select_attention", {"energy": "dot", "scale": -0.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [33, 64])
def test_weights_and_selection(op, options, d):
    """Several blocks of queries and keys."""
    case = qkv("blocks", 1, 210, 333, 4, 2, d, **options)
    PROPERTIES["forward"](testing.registry()[op], case, torch.bfloat16)


def test_errors_of_peaked_attention_are_at_most_torchs():
    """Mean squares against fp64. The largest weight of a row must be 1, which bf16 holds exactly: a
    maximum that lags behind costs a tenth."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 200, 2, 64, generator=generator).bfloat16() for _ in range(4))
    tensors = q * 6, k, v

    def results(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    def torchs(q, k, v, causal):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal
        ).transpose(1, 2)

    totals = torch.zeros(2, 4, dtype=torch.float64)
    for causal in (False, True):
        exact = results(partial(torchs, causal=causal), torch.float64)
        for total, function in zip(totals, (attention, torchs), strict=True):
            found = results(partial(function, causal=causal), torch.bfloat16)
            total += torch.stack(
                [(a - b).square().mean() for a, b in zip(found, exact, strict=True)]
            )
    assert (totals[0] <= totals[1]).all(), totals


def test_gradients_of_a_linear_loss_round_once():
    """bf16 rounds the gradients of the logits, as torch's own products do, and no sum of them."""
    x, weight, _ = inputs(64, 300, 96, torch.bfloat16)
    target = torch.arange(64) % 300

    def gradients(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        if leaves[0].dtype == torch.bfloat16 and use_ours:
            loss = linear_cross_entropy(*leaves, target)
        else:
            loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, target)
        return torch.autograd.grad(loss, leaves)

    use_ours = True
    found = gradients(x, weight)
    use_ours = False
    torchs, exact = gradients(x, weight), gradients(x.double(), weight.double())
    for ours, theirs, right in zip(found, torchs, exact, strict=True):
        assert (ours - right).square().mean() <= (theirs - right).square().mean()
