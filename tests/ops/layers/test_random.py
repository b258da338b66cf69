"""Draws by index: the bits of the definition, their statistics, memory, bad input."""

import math

import pytest
import torch

import omniattn.functional as F
from omniattn import reference, testing
from omniattn.modules import Dropout
from omniattn.reference.layers import philox

SEEDS = ([0, 0], [-5, 7], [2**63 - 1, 2**40 + 3])


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_those_of_the_definition(seed, isa):
    """Every length around vectors, blocks of words and work items; on several threads."""
    seed = torch.tensor(seed)
    with testing.isa(isa), testing.threads(3):
        for n in (0, 1, 3, 4, 5, 31, 32, 33, 1023, 1024, 1025, 40_001):
            keep = philox.elementwise_keep(torch.Size([n]), 0.3, seed)
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                ones = torch.ones(n, dtype=dtype)
                assert torch.equal(F.dropout(ones, 0.3, seed=seed) != 0, keep)
            assert torch.equal(F.uniform_like(ones, seed=seed), philox.uniform(n, seed))
            assert torch.equal(F.normal_like(ones, seed=seed), philox.normal(n, seed))


def test_an_element_beyond_2_to_the_34_reads_the_next_counter_word():
    """The upper counter word, which no tensor of a test is long enough for: by the definition."""
    group = torch.tensor([2**32 - 1, 2**32])
    low, high = group & 0xFFFFFFFF, group >> 32
    words = philox.philox4x32(
        (low, high, torch.full_like(group, 0x454C454D), torch.tensor(9)),
        (torch.tensor(7), torch.tensor(0)),
    )
    assert high.tolist() == [0, 1]
    assert words[0][0] != words[0][1]


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
def test_kept_share_and_scale(p):
    y = F.dropout(torch.ones(200_000), p, seed=torch.tensor([3, 1]))
    share = (y != 0).double().mean().item()
    assert abs(share - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / y.numel()) + 1e-6
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p)).item()}


def test_noise_has_the_moments_of_its_distribution():
    z = F.normal_like(torch.empty(200_000), seed=torch.tensor([4, 0])).double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert (z**power).mean().item() == pytest.approx(moment, abs=0.06)


def test_p_zero_and_one_and_evaluation():
    x = torch.tensor([1.0, math.inf, math.nan], requires_grad=True)
    assert F.dropout(x, 0.0) is x and F.dropout(x, 0.9, training=False) is x
    for backend in (None, "reference"):
        y = F.dropout(x, 1.0, backend=backend)
        assert torch.equal(y, torch.zeros(3))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(3))


def test_dropped_values_become_zero_whatever_they_were():
    x = torch.full((4000,), math.inf)
    y = F.dropout(x, 0.5, seed=torch.tensor([1, 2]))
    assert set(y.tolist()) == {0.0, math.inf}


def test_keeps_the_seed_alone_for_the_backward():
    kept = []
    x = torch.randn(50, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = F.dropout(x, 0.5)
    assert [t.numel() for t in kept] == [2]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.where(y != 0, 2.0, 0.0))


def test_module_follows_the_generator_and_the_mode():
    x, layer = torch.ones(1000), Dropout(0.25)
    torch.manual_seed(5)
    first = layer(x)
    assert not torch.equal(first, layer(x))
    torch.manual_seed(5)
    assert torch.equal(first, layer(x))
    assert layer.eval()(x) is x


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x=torch.ones(3).int()), TypeError, "x must be float64"),
        (dict(p=-0.1), ValueError, "p must be a finite number >= 0 and <= 1, got p=-0.1"),
        (dict(p=math.nan), ValueError, "p must be a finite number"),
        (dict(seed=torch.zeros(2)), ValueError, "seed must be an int64 tensor"),
        (dict(seed=torch.zeros(3).long()), ValueError, "seed must be an int64 tensor"),
        (dict(backend="tpu"), ValueError, "backend must be one of"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=f"dropout: .*{message}"):
        F.dropout(**({"x": torch.ones(3)} | arguments))
    with pytest.raises(ValueError, match=r"Dropout: p must be in \[0, 1\]"):
        Dropout(1.5)


def test_reference_draws_its_own_seed():
    torch.manual_seed(1)
    y = reference.dropout(torch.ones(100))
    torch.manual_seed(1)
    assert torch.equal(y, F.dropout(torch.ones(100)))


def test_a_seed_without_values():
    seed, x = torch.tensor([1, 0], device="meta"), torch.ones(5)
    for draw in (F.dropout, F.uniform_like, F.normal_like):
        with pytest.raises(ValueError, match=r"seed must have values, got seed\.device=meta"):
            draw(x, seed=seed)
    with torch.device("meta"):
        assert F.dropout(x).is_cpu


def test_nested_tensors_are_named():
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"uniform_like: x must not be nested .*torch.jagged"):
        F.uniform_like(nested)
