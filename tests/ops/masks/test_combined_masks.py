"""Masks joined by &, | and ~: their blocks, their tensors, and parts that do not fit."""

import pytest
import torch

from omniattn import functional
from omniattn.encoding.masks import Sizes
from omniattn.functional import masks
from omniattn.functional.masks.computed import KEPT

IDS = torch.arange(140).view(2, 70) // 25


def test_a_computed_mask_keeps_the_blocks_of_its_last_sizes():
    mask, device = masks.SlidingWindow(3, 0) | masks.GlobalTokens((0,)), torch.device("cpu")
    for tk in (200, *range(201, 201 + KEPT - 1), 200, 300):
        mask.rules_of_call(Sizes(100, tk, device))
    ((_, blocks),) = mask.known
    kept = [size[1] for size in blocks]
    assert kept == [*range(202, 201 + KEPT - 1), 200, 300]
    mask, sizes = ~masks.Documents(IDS) | ~masks.KeyPadding(IDS > 1), Sizes(70, 70, device)
    (first,), (second,) = mask.rules_of_call(sizes), mask.rules_of_call(sizes)
    assert first[3][0] is second[3][0]


def test_combined_masks_follow_their_tensors():
    q, lengths = torch.randn(2, 70, 1, 8), torch.tensor([5, 70])
    mask = masks.KeyLengths(lengths) | masks.KeyLengths(torch.tensor([1, 1]))
    before = functional.attention(q, q, q, mask=mask)
    lengths.copy_(torch.tensor([70, 5]))
    after = functional.attention(q, q, q, mask=mask)
    assert not torch.equal(before, after)
    expected = functional.attention(q, q, q, mask=masks.KeyLengths(lengths))
    torch.testing.assert_close(after, expected)
    with torch.inference_mode():
        mask = ~masks.KeyPadding(torch.ones(2, 70, dtype=torch.bool))
        assert not functional.attention(q, q, q, mask=mask).any()
    q.requires_grad_()
    functional.attention(q, q, q, mask=mask).sum().backward()  # by blocks made in inference


def _data(t, new):
    t.data = new


#: Writes that do not raise the version of a tensor.
WRITES = {
    "numpy": lambda t, new: t.numpy().__setitem__(..., new.numpy()),
    "copied data": lambda t, new: t.data.copy_(new),
    "dlpack": lambda t, new: torch.from_dlpack(t).copy_(new),
    "other data": _data,
}
COMBINED = {
    "not": (lambda t: ~masks.Documents(t), IDS),
    "or": (lambda t: masks.Documents(t) | masks.GlobalTokens((0,)), IDS),
    "nested": (lambda t: ~(~masks.Documents(t) & ~masks.SlidingWindow(3, 3)), IDS),
    "bool": (lambda t: ~masks.BoolMask(t), torch.rand(2, 1, 70, 70) < 0.5),
    "padding": (lambda t: ~masks.KeyPadding(t), IDS > 1),
    "lengths": (lambda t: masks.KeyLengths(t) | masks.SlidingWindow(2, 0), torch.tensor([9, 60])),
    "prefix": (lambda t: ~masks.PrefixLM(t), torch.tensor([9, 60])),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", COMBINED)
def test_combined_masks_follow_writes_that_raise_no_version(name, write):
    (make, values), q = COMBINED[name], torch.randn(2, 70, 1, 8)
    kept, new = values.clone(), values.flip(0)
    mask, version = make(kept), kept._version
    before = functional.attention(q, q, q, mask=mask)
    WRITES[write](kept, new)
    assert kept._version == version
    after = functional.attention(q, q, q, mask=mask)
    assert not torch.equal(before, after)
    assert torch.equal(after, functional.attention(q, q, q, mask=make(new)))


@pytest.mark.parametrize(
    "part",
    [
        lambda: masks.BoolMask(torch.ones(2, 1, 70, 70, dtype=torch.bool)),
        lambda: masks.from_predicate(lambda b, h, q, k: q >= k, 70, 70),
        lambda: masks.KeyLengths(torch.tensor([3])),
        lambda: masks.Documents(torch.zeros(2, 9, dtype=torch.long)),
        lambda: masks.GridNeighborhood((4,), 2),
    ],
)
def test_parts_of_combined_masks_must_fit(part):
    q, k, part = torch.randn(2, 3, 1, 8), torch.randn(2, 70, 1, 8), part()
    causal = masks.Causal()
    for mask in (part, part | causal, ~part, causal & ~(part | part), ~(part & causal)):
        with pytest.raises(ValueError, match=r"^attention: |^GridNeighborhood: "):
            functional.attention(q, k, k, mask=mask)
