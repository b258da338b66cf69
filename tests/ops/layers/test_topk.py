"""top_k beyond what tests/ops/test_specs.py runs for every op."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import omniattn.functional as F
from omniattn import reference, testing

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_special_values_at_every_place(dtype, isa):
    random = torch.Generator().manual_seed(0)
    pool = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1.0])
    scores = pool[torch.randint(8, (60, 37), generator=random)].to(dtype)
    mask = torch.rand(60, 37, generator=random) < 0.5
    with testing.isa(isa):
        for k in (1, 5, 20, 37):
            for allowed in (None, mask):
                values, index = F.top_k(scores, k, mask=allowed)
                expected, places = reference.top_k(scores, k, mask=allowed)
                assert torch.equal(index, places)
                torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_order_of_equal_scores_is_that_of_their_indices():
    scores = torch.zeros(3, 1000)
    scores[:, 700:] = 1
    assert torch.equal(F.top_k(scores, 4)[1], torch.arange(700, 704).expand(3, 4))


def test_the_order_of_the_indices():
    scores = torch.tensor([[1.0, 3.0, NAN, 3.0, 2.0], [NAN, -INF, 5.0, 4.0, 0.0]])
    mask = torch.tensor([[True, True, False, True, True], [False, False, True, True, False]])
    values, index = F.top_k(scores, 3, mask=mask, sorted_by_index=True)
    assert index.tolist() == [[1, 3, 4], [2, 3, -1]]
    assert values.tolist() == [[3.0, 3.0, 2.0], [5.0, 4.0, -INF]]
    assert F.top_k(scores, 5, sorted_by_index=True)[1].tolist() == [list(range(5))] * 2
    with pytest.raises(TypeError, match="top_k: sorted_by_index must be"):
        F.top_k(scores, 2, sorted_by_index=1)


def test_a_k_that_varies_compiles_once():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda s: F.top_k(s, s.shape[-1] // 2)[1], backend=counter, fullgraph=True, dynamic=True
    )
    for n in (8, 13, 20):
        scores = torch.randn(2, n)
        assert torch.equal(compiled(scores), F.top_k(scores, n // 2)[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 6}, ValueError, "0 <= k <= n"),
        ({"k": -1}, ValueError, "0 <= k <= n"),
        ({"scores": torch.ones(2, 5).long()}, TypeError, "scores must be float64"),
        ({"scores": torch.tensor(1.0)}, ValueError, r"scores must have shape \(..., n\)"),
        ({"mask": torch.ones(2, 5)}, TypeError, "mask must be a bool tensor"),
        ({"mask": torch.ones(5).bool()}, ValueError, r"mask must have shape \(2, 5\)"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=f"top_k: .*{message}"):
        F.top_k(**({"scores": torch.ones(2, 5), "k": 2} | arguments))
