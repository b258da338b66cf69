"""causal_conv1d beyond what tests/ops/test_specs.py runs for every op."""

import itertools

import pytest
import torch

import omniattn.functional as F
from omniattn import testing
from omniattn.functional.recurrences._steps import causal_conv1d_inplace


def test_equals_torch():
    x, weight, bias = torch.randn(2, 50, 30), torch.randn(30, 4), torch.randn(30)
    conv = torch.nn.Conv1d(30, 30, 4, groups=30, padding=3)
    with torch.no_grad():
        conv.weight.copy_(weight[:, None])
        conv.bias.copy_(bias)
        expected = torch.nn.functional.silu(conv(x.mT)[..., :50]).mT
    torch.testing.assert_close(F.causal_conv1d(x, weight, bias, activation="silu"), expected)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pieces_of_any_length_equal_the_whole(taps, dtype, isa):
    x, weight, bias = torch.randn(2, 13, 35), torch.randn(35, taps), torch.randn(35)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    options = {"activation": "silu", "return_final_state": True}
    with testing.isa(isa):
        y, last = F.causal_conv1d(x, weight, bias, **options)
        for lengths in ([1] * 13, [2, 0, 5, 6], [13]):
            pieces, state = [], None
            for piece in x.split(lengths, 1):
                part, state = F.causal_conv1d(piece, weight, bias, initial_state=state, **options)
                pieces.append(part)
            assert torch.equal(torch.cat(pieces, 1), y)
            assert torch.equal(state, last)
        for rows in (taps - 1, taps + 1):  # the last inputs, and more of them
            for weights in (weight, weight.mT.contiguous().mT):
                for state in (x.new_zeros(2, 35, rows), x.new_zeros(2, rows, 35).mT):
                    pieces = [
                        causal_conv1d_inplace(piece, weights, bias, state, True)
                        for piece in x.split(1, 1)
                    ]
                    assert torch.equal(torch.cat(pieces, 1), y)
                    assert torch.equal(state, x[:, 13 - rows :].mT)
    if taps > 1:
        assert torch.equal(last, x[:, 14 - taps :].mT)


def test_gradients_through_the_state_equal_those_of_the_whole():
    x = torch.randn(2, 9, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    whole = F.causal_conv1d(x, weight, activation="silu")
    first, state = F.causal_conv1d(x[:, :2], weight, activation="silu", return_final_state=True)
    second = F.causal_conv1d(x[:, 2:], weight, activation="silu", initial_state=state)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (x, weight), grad)
    found = torch.autograd.grad(torch.cat((first, second), 1), (x, weight), grad)
    torch.testing.assert_close(found, expected)
    (of_state,) = torch.autograd.grad(
        F.causal_conv1d(x, weight, return_final_state=True)[1].sum(), x
    )
    assert torch.equal(of_state, torch.zeros_like(x).index_fill(1, torch.tensor([6, 7, 8]), 1.0))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 63, 700])
@pytest.mark.parametrize("taps", [2, 4])
def test_threads_split_one_sequence_over_time(taps, steps):
    tensors = [torch.randn(*s) for s in ((1, steps, 200), (200, taps), (200,), (1, 200, taps - 1))]
    results = []
    for threads in (1, 4):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with testing.threads(threads):
            y, state = F.causal_conv1d(
                *leaves[:3], initial_state=leaves[3], activation="silu", return_final_state=True
            )
            (y.square().sum() + state.square().sum()).backward()
        results.append([y, state, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    leaves = [t.double().requires_grad_() for t in tensors]
    y, state = F.causal_conv1d(
        *leaves[:3],
        initial_state=leaves[3],
        activation="silu",
        return_final_state=True,
        backend="reference",
    )
    (y.square().sum() + state.square().sum()).backward()
    for got, wanted in zip(results[0][2:], leaves, strict=True):
        torch.testing.assert_close(got.double(), wanted.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_equal_each_alone(integers, taps, isa):
    """Gradients too; sequences shorter than the filter, and empty ones."""
    bounds = [0, 0, 1, 3, 39, 39, 47]
    tensors = [torch.randn(*s) for s in ((1, 47, 35), (35, taps), (35,), (6, 35, taps - 1))]
    options = {"activation": "silu", "return_final_state": True}
    grad_y, grad_state = torch.randn(1, 47, 35), torch.randn(6, 35, taps - 1)

    def gradients(leaves, *results):
        sum((y * g).sum() for y, g in results).backward()
        return [leaf.grad for leaf in leaves]

    with testing.isa(isa):
        x, weight, bias, state = leaves = [t.clone().requires_grad_() for t in tensors]
        y, last = F.causal_conv1d(
            x,
            weight,
            bias,
            initial_state=state,
            cu_seqlens=torch.tensor(bounds, dtype=integers),
            **options,
        )
        found = gradients(leaves, (y, grad_y), (last, grad_state))
        x, weight, bias, state = leaves = [t.clone().requires_grad_() for t in tensors]
        pairs = []
        for n, (a, b) in enumerate(itertools.pairwise(bounds)):
            alone = F.causal_conv1d(
                x[:, a:b], weight, bias, initial_state=state[n : n + 1], **options
            )
            assert torch.equal(alone[0], y[:, a:b])
            assert torch.equal(alone[1], last[n : n + 1])
            pairs += [(alone[0], grad_y[:, a:b]), (alone[1], grad_state[n : n + 1])]
        expected = gradients(leaves, *pairs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [[0, 2, 4], [0, 3, 2], [-1, 3]])
def test_boundaries_grow_to_the_last_row(bounds):
    with pytest.raises(
        ValueError, match="causal_conv1d: cu_seqlens must grow from 0 to the number"
    ):
        F.causal_conv1d(torch.ones(1, 3, 4), torch.ones(4, 3), cu_seqlens=torch.tensor(bounds))


def test_a_slice_of_a_projection_is_read_in_place():
    wide = torch.randn(2, 10, 50)
    x = wide[..., 7:27]
    weight = torch.randn(20, 4)
    assert torch.equal(F.causal_conv1d(x, weight), F.causal_conv1d(x.contiguous(), weight))
    turned = x.mT.contiguous().mT
    assert torch.equal(F.causal_conv1d(turned, weight), F.causal_conv1d(x, weight))


def test_what_lies_in_the_future_does_not_matter():
    x, weight = torch.randn(1, 8, 5), torch.randn(5, 4)
    y = F.causal_conv1d(x, weight)
    x[:, 5:] = float("nan")
    assert torch.equal(F.causal_conv1d(x, weight)[:, :5], y[:, :5])


X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"x must have shape \(B, T, D\), got x.shape=\(3, 4\)"),
        ({"x": X.long()}, TypeError, "x must be float64"),
        ({"weight": torch.ones(3, 4)}, ValueError, r"weight must have shape \(D, K\)"),
        ({"weight": torch.ones(4, 0)}, ValueError, r"K >= 1, got weight.shape=\(4, 0\)"),
        ({"weight": torch.ones(4, 1, 3)}, ValueError, r"weight must have shape \(D, K\)"),
        ({"weight": torch.ones(4, 3).double()}, TypeError, "weight must have the dtype of x"),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have shape \(4,\)"),
        ({"initial_state": torch.ones(2, 4, 3)}, ValueError, r"must have shape \(2, 4, 2\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"B must be 1 with cu_seqlens, got x"),
        ({"cu_seqlens": torch.tensor([0.0, 3])}, TypeError, "cu_seqlens must be integers"),
        ({"activation": "relu"}, ValueError, 'activation must be "silu" or None'),
        ({"return_final_state": 1}, TypeError, "return_final_state must be True or False"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=f"causal_conv1d: .*{message}"):
        F.causal_conv1d(**({"x": X, "weight": torch.ones(4, 3)} | arguments))
