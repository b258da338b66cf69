"""dsa_indexer and its loss beyond what tests/ops/test_specs.py runs for every op."""

import math

import pytest
import torch

import omniattn.functional as F
from omniattn import reference, testing
from omniattn.functional.masks import KeyPadding
from omniattn.reference.sparse.indexer import indexer_scores

NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def small(*shape, dtype=torch.float32):
    """Integers, of which scores have no rounding and many ties."""
    return torch.randint(-2, 3, shape).to(dtype)


def both(*arguments, **options):
    """Returns the kernel's indices and scores after comparing them with the definition's."""
    found = F.dsa_indexer(*arguments, return_scores=True, **options)
    expected = reference.dsa_indexer(*arguments, return_scores=True, **options)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    return found


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("tie", ["first", "recent"])
@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_that_are_full_many_times(dtype, isa, tie):
    """Rising, falling and equal scores, more of them than a list keeps at a time."""
    tk = 700
    key = torch.arange(tk)
    rows = torch.stack((key, tk - key, key % 7, key * 0, (key - 350).abs() % 256), -1)
    k = (rows % 256)[None].to(dtype)  # small enough for every dtype
    q = torch.eye(5, dtype=dtype)[None, :, None]
    with testing.isa(isa):
        for topk in (1, 5, 63, 64, 200, 699):
            for causal in (True, False):
                both(q, k, None, topk, causal=causal, tie=tie)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_numbers_come_last(dtype, isa):
    pool = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1.0])
    k = pool[torch.randint(8, (3, 90, 1))].to(dtype)
    q = torch.ones(3, 4, 1, 1, dtype=dtype)
    real = torch.rand(3, 90) < 0.6
    with testing.isa(isa):
        for topk in (1, 40, 90, 120):
            for tie in ("first", "recent"):
                for padding in (None, real):
                    options = {"causal": False, "tie": tie, "key_padding": padding}
                    both(q, k, None, topk, activation=None, **options)
                    both(q, k, None, topk, **options)


def test_a_weight_of_zero_times_infinity_is_not_a_number():
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[INF], [2.0], [-INF]]])
    index, scores = both(q, k, torch.zeros(1, 1, 1), 3, causal=False)
    assert index.tolist() == [[[1, 2, 0]]]
    assert scores[0, 0, :2].tolist() == [0, 0] and scores[0, 0, 2].isnan()


def test_relu_makes_ties_that_the_rule_decides():
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[-1.0], [-3.0], [2.0], [-2.0]]])
    assert F.dsa_indexer(q, k, None, 3).tolist() == [[[2, 0, 1]]]
    assert F.dsa_indexer(q, k, None, 3, tie="recent").tolist() == [[[2, 3, 1]]]
    assert F.dsa_indexer(q, k, None, 3, activation=None).tolist() == [[[2, 0, 3]]]
    assert F.dsa_indexer(q, k, None, 3, sorted_by_index=True).tolist() == [[[0, 1, 2]]]


def test_a_query_has_as_many_keys_as_it_sees():
    q, k = torch.ones(1, 5, 1, 1), torch.ones(1, 3, 1)
    index = F.dsa_indexer(q, k, None, 2)
    assert index.tolist() == [[[-1, -1], [-1, -1], [0, -1], [0, 1], [0, 1]]]
    padding = torch.tensor([[False, True, False]])
    index, scores = F.dsa_indexer(
        q, k, None, 4, key_padding=padding, sorted_by_index=True, return_scores=True
    )
    assert index[0, -1].tolist() == [1, -1, -1, -1]
    assert scores[0, -1].tolist() == [1, -INF, -INF, -INF]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_as_exact_as_the_definition(dtype):
    """Checks the returned scores, and that the exact scores of the chosen keys are the largest."""
    q, k = torch.randn(2, 40, 8, 64).to(dtype), torch.randn(2, 600, 64).to(dtype)
    w = torch.randn(2, 40, 8).to(dtype)
    index, scores = F.dsa_indexer(q, k, w, 50, return_scores=True)
    exact = indexer_scores(q.double(), k.double(), w.double(), "relu")
    size = exact.abs().max()
    eps = torch.finfo(scores.dtype).eps * (8 * 64) ** 0.5 * size
    gathered = exact.gather(-1, index.long())
    assert (gathered - scores).abs().max() <= eps
    ends = torch.arange(560, 600)[:, None] + 1
    seen = exact.masked_fill(torch.arange(600) >= ends, -INF)
    assert (seen.sort(-1, descending=True).values[..., :50] - gathered).abs().max() <= 2 * eps


def test_weights_may_have_full_precision():
    q, k = torch.randn(1, 9, 4, 16).bfloat16(), torch.randn(1, 30, 16).bfloat16()
    both(small(1, 9, 4, 16).bfloat16(), small(1, 30, 16).bfloat16(), small(1, 9, 4), 7)
    with pytest.raises(TypeError, match="w must have the dtype of q or be float32"):
        F.dsa_indexer(q, k, torch.ones(1, 9, 4, dtype=torch.float64), 7)


@pytest.mark.parametrize(
    ("batch", "tq", "tk", "heads"), [(1, 1, 5000, 64), (2, 3, 2000, 1), (1, 70, 1030, 2)]
)
def test_few_queries_split_their_keys(batch, tq, tk, heads):
    """Over items, whose candidates are merged: the same lists on any number of threads."""
    q, k, w = small(batch, tq, heads, 16), small(batch, tk, 16), small(batch, tq, heads)
    for options in ({}, {"tie": "recent"}, {"causal": False}):
        for topk in (3, 300, tk):
            with testing.threads(1):
                expected = both(q, k, w, topk, **options)
            with testing.threads(3):
                found = both(q, k, w, topk, **options)
            assert torch.equal(found[0], expected[0])


def test_under_autocast_products_have_its_dtype():
    q, k, w = torch.randn(1, 9, 4, 16), torch.randn(1, 40, 16), torch.randn(1, 9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.dsa_indexer(q, k, w, 5)
    assert torch.equal(found, F.dsa_indexer(q.bfloat16(), k.bfloat16(), w, 5))


def test_there_is_no_gradient():
    q, k = torch.randn(1, 3, 2, 4, requires_grad=True), torch.randn(1, 5, 4, requires_grad=True)
    index, scores = F.dsa_indexer(q, k, None, 2, return_scores=True)
    assert not index.requires_grad and not scores.requires_grad


QUERIES, KEYS = torch.ones(2, 3, 4, 5), torch.ones(2, 6, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": QUERIES.long()}, TypeError, "q must be float64"),
        ({"q": QUERIES[0]}, ValueError, r"q and k must have shapes \(B, Tq, H, D\)"),
        ({"k": KEYS[:1]}, ValueError, r"q and k must have shapes \(B, Tq, H, D\)"),
        ({"k": KEYS.double()}, TypeError, "k must have the dtype of q"),
        ({"w": torch.ones(2, 3)}, ValueError, r"w must have shape \(2, 3, 4\)"),
        ({"topk": -1}, ValueError, "topk must be an int >= 0"),
        ({"topk": 2**31}, ValueError, "topk must be an int >= 0"),
        ({"topk": 1.5}, TypeError, "topk must be an int"),
        ({"activation": "gelu"}, ValueError, 'activation must be "relu" or None'),
        ({"tie": "last"}, ValueError, 'tie must be one of "first", "recent"'),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"sorted_by_index": 1}, TypeError, "sorted_by_index must be True or False"),
        ({"key_padding": torch.ones(2, 5).bool()}, ValueError, "key_padding must have shape"),
        ({"backend": "cuda"}, ValueError, "backend must match the device"),
    ],
)
def test_bad_input(arguments, error, message):
    given = {"q": QUERIES, "k": KEYS, "w": None, "topk": 2} | arguments
    with pytest.raises(error, match=f"dsa_indexer: .*{message}"):
        F.dsa_indexer(**given)


# The loss.


def dense_loss(q_idx, k_idx, w, q, k, seen, scale=None):
    """KL(p || softmax I) from its formula, with probabilities of each head."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    logits = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    heads = logits.masked_fill(~seen[:, None], -INF).softmax(-1)
    p = (heads.sum(1) / heads.sum((1, 3))[..., None]).detach()
    scores = torch.einsum("bih,bihj->bij", w, torch.einsum("bihd,bjd->bihj", q_idx, k_idx).relu())
    logs = scores.masked_fill(~seen, -INF).log_softmax(-1)
    terms = torch.where(p > 0, p * (p.log() - logs), 0)
    return terms.masked_fill(~seen, 0).sum(-1)


def loss_inputs(b=2, t=20, hi=3, di=4, hq=4, hkv=2, d=6):
    shapes = ((b, t, hi, di), (b, t, di), (b, t, hi), (b, t, hq, d), (b, t, hkv, d))
    made = [torch.randn(s, dtype=torch.float64) for s in shapes]
    for x in made[:3]:
        x.requires_grad_()
    return made


@pytest.mark.parametrize(("hq", "hkv"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_loss_equals_its_formula(hq, hkv, stage, with_lse):
    q_idx, k_idx, w, q, k = inputs = loss_inputs(hq=hq, hkv=hkv)
    seen = torch.ones(20, 20, dtype=torch.bool).tril().expand(2, -1, -1)
    lse = indices = None
    if stage == "sparse":
        indices = F.dsa_indexer(q_idx, k_idx, w, 5)
        index = indices.long()
        seen = torch.zeros(2, 20, 21, dtype=torch.bool)
        seen = seen.scatter(-1, torch.where(index < 0, 20, index), True)[..., :20]
        if with_lse:
            options = {"block_size": 1, "return_lse": True}
            _, lse = F.selected_attention(q, k, k, indices[:, None], **options)
    elif with_lse:
        _, lse = F.attention(q, k, k, causal=True, return_lse=True)
    expected = dense_loss(*inputs, seen)
    weights = torch.randn(2, 20, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (q_idx, k_idx, w))
    loss = F.dsa_indexer_loss(q_idx, k_idx, w, q, k, lse, indices)
    found = torch.autograd.grad((loss * weights).sum(), (q_idx, k_idx, w))
    torch.testing.assert_close(loss, expected)
    for a, e in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, e)


def test_empty_lists_name_no_key():
    q_idx, k_idx, w, q, k = loss_inputs()
    indices = F.dsa_indexer(q_idx, k_idx, w, 0)
    loss = F.dsa_indexer_loss(q_idx, k_idx, w, q, k, None, indices)
    assert not loss.any()
    assert not any(t.any() for t in torch.autograd.grad(loss.sum(), (q_idx, k_idx, w)))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_the_loss_are_those_of_differences(sparse):
    q_idx, k_idx, w, q, k = loss_inputs(1, 5)
    indices = F.dsa_indexer(q_idx, k_idx, w, 3) if sparse else None
    assert torch.autograd.gradcheck(
        lambda a, b, c: F.dsa_indexer_loss(a, b, c, q, k, None, indices), (q_idx, k_idx, w)
    )


def test_the_target_has_no_gradient():
    q_idx, k_idx, w, q, k = loss_inputs(1, 5)
    q.requires_grad_(), k.requires_grad_()
    _, lse = F.attention(q, k, k, causal=True, return_lse=True)
    loss = F.dsa_indexer_loss(q_idx, k_idx, w, q, k, lse).sum()
    assert torch.autograd.grad(loss, (q, k), allow_unused=True) == (None, None)


def test_queries_of_one_key_and_of_none_lose_nothing():
    q_idx, k_idx, w, q, k = loss_inputs(1, 6)
    loss = F.dsa_indexer_loss(q_idx, k_idx, w, q, k)
    assert loss[0, 0] == 0 and (loss[0, 1:] > 0).all()
    lists = torch.full((1, 6, 3), -1)
    lists[0, 4, 1] = 2
    loss = F.dsa_indexer_loss(q_idx, k_idx, w, q, k, None, lists)
    assert loss.tolist() == [[0.0] * 6]
    for grad in torch.autograd.grad(loss.sum(), (q_idx, k_idx, w)):
        assert not grad.any()
    later = F.dsa_indexer_loss(q_idx, k_idx[:, :2], w, q, k[:, :2])  # four queries see no key
    assert not later[0, :5].any() and later[0, 5] > 0


@pytest.mark.parametrize("sparse", [False, True])
def test_padded_keys_take_no_part(sparse):
    q_idx, k_idx, w, q, k = loss_inputs(1, 12)
    real = torch.arange(12)[None] < 9
    indices = F.dsa_indexer(q_idx, k_idx, w, 8, causal=False) if sparse else None
    mask = None if sparse else KeyPadding(real)
    lse = None if sparse else F.attention(q, k, k, mask=mask, return_lse=True)[1]
    options = {"causal": False}
    padded = F.dsa_indexer_loss(q_idx, k_idx, w, q, k, lse, indices, key_padding=real, **options)
    if sparse:
        indices = indices.masked_fill(indices >= 9, -1)
    shorter = F.dsa_indexer_loss(q_idx, k_idx[:, :9], w, q, k[:, :9], None, indices, **options)
    torch.testing.assert_close(padded, shorter)


def test_all_keys_in_lists_are_the_dense_stage():
    q_idx, k_idx, w, q, k = loss_inputs()
    lists = torch.arange(20).flip(0).expand(2, 20, 20)  # later ones are hidden
    options = {"scale": 0.3, "activation": None}
    torch.testing.assert_close(
        F.dsa_indexer_loss(q_idx, k_idx, w, q, k, None, lists, **options),
        F.dsa_indexer_loss(q_idx, k_idx, w, q, k, **options),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_trains_an_indexer(dtype):
    """To the attention that it learns from: its most probable keys are then chosen."""
    q, k = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 1, 16)
    _, lse = F.attention(q, k, k, causal=True, return_lse=True)
    q_idx = torch.randn(1, 40, 4, 16, requires_grad=True)
    k_idx = torch.randn(1, 40, 16, requires_grad=True)
    w = torch.full((1, 40, 4), 0.1, requires_grad=True)
    optimizer = torch.optim.Adam((q_idx, k_idx, w), lr=0.05)
    losses = []
    for _ in range(60):
        given = (q_idx.to(dtype), k_idx.to(dtype), w.to(dtype))
        loss = F.dsa_indexer_loss(*given, q.to(dtype), k.to(dtype), lse).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.ones(2, 3, 4, 6)}, ValueError, r"q and k must have shapes"),
        ({"k": torch.ones(2, 5, 2, 5)}, ValueError, r"q and k must have shapes"),
        ({"q": torch.ones(2, 3, 3, 5)}, ValueError, "Hq a multiple of Hkv"),
        ({"lse": torch.ones(2, 3, 4)}, ValueError, r"lse must have shape \(2, 4, 3\)"),
        ({"lse": torch.ones(2, 4, 3).half()}, TypeError, "lse must be torch.float32 on the device"),
        (
            {"indices": torch.tensor([[[1, 2], [4, 4], [3, -1]]] * 2), "debug": True},
            ValueError,
            r"indices must name each key once in a list, got indices\[\(0, 1\)\]=\[4, 4\]",
        ),
        ({"indices": torch.ones(2, 3, 2)}, TypeError, "indices must be an int32 or int64"),
        ({"indices": torch.zeros(2, 4, 2).int()}, ValueError, "indices must have shape"),
        ({"indices": torch.full((2, 3, 2), 6)}, ValueError, r"indices must be in \[-1, 6\)"),
        ({"indices": torch.full((2, 3, 2), -2)}, ValueError, r"indices must be in \[-1, 6\)"),
        ({"scale": math.inf}, ValueError, "scale must be a finite number"),
        ({"activation": "silu"}, ValueError, "activation must be"),
        ({"w": torch.ones(2, 3)}, ValueError, "w must have shape"),
        ({"k_idx": KEYS[0]}, ValueError, "q_idx and k_idx must have shapes"),
    ],
)
def test_bad_input_of_the_loss(arguments, error, message):
    given = {"q_idx": QUERIES, "k_idx": KEYS, "w": None} | {
        "q": torch.ones(2, 3, 4, 5),
        "k": torch.ones(2, 6, 2, 5),
    }
    with pytest.raises(error, match=f"dsa_indexer_loss: .*{message}"):
        F.dsa_indexer_loss(**(given | arguments))
