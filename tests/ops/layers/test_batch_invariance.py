"""`config.batch_invariant`: a token has the same bits in decoding, in a chunk and in the whole."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from omniattn import config, functional, testing
from omniattn.functional import masks
from omniattn.models import LlamaConfig

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
T = 300
MASKS = {
    "causal": {"causal": True},
    "window": {"mask": masks.sliding_window(70, "fla")},
    "odd window": {"mask": masks.sliding_window(131, "fla")},
    "capped": {"causal": True, "softcap": 5.0},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


@pytest.fixture(autouse=True)
def invariant():
    with config.batch_invariant():
        yield


def heads(dtype, *sizes):
    torch.manual_seed(0)
    return tuple(torch.randn(2, T, h, 64).to(dtype) for h in sizes)


@pytest.mark.parametrize("level", testing.isas())
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("name", MASKS)
def test_attention_of_chunks_is_that_of_the_whole(name, dtype, level):
    q, k, v = heads(dtype, 4, 2, 2)
    with testing.isa(level):
        whole, lse = functional.attention(q, k, v, return_lse=True, **MASKS[name])
        for begin, end in [(0, 1), (0, 7), (5, 6), (100, 117), (129, 226), (299, 300)]:
            part, part_lse = functional.attention(
                q[:, begin:end], k[:, :end], v[:, :end], return_lse=True, **MASKS[name]
            )
            assert torch.equal(part, whole[:, begin:end]), (begin, end)
            assert torch.equal(part_lse, lse[..., begin:end]), (begin, end)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("page", [None, 16])
def test_cached_attention_is_that_of_the_whole(page, dtype):
    q, k, v = heads(dtype, 4, 2, 2)
    whole = functional.attention(q, k, v, causal=True)
    lengths = torch.tensor([77, 256])
    rows = torch.arange(2)
    options = {}
    if page is not None:
        pages = -(-T // page)
        table = torch.randperm(2 * pages).view(2, pages).int()
        pooled = []
        for t in (k, v):
            padded = nn.functional.pad(t, (0, 0, 0, 0, 0, pages * page - T))
            pool = torch.empty(2 * pages, page, 2, 64, dtype=dtype)
            pool[table.long()] = padded.view(2, pages, page, 2, 64)
            pooled.append(pool)
        (k, v), options = pooled, {"block_table": table}
    step = functional.attention_cached(q[rows, lengths - 1, None], k, v, lengths, **options)
    assert torch.equal(step[:, 0], whole[rows, lengths - 1])


def test_the_switch_is_needed():
    """Otherwise few rows take faster kernels, whose sums have another order."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, 700), torch.randn(300, 700)
    q, k, v = heads(F32, 4, 2, 2)

    def rows_differ():
        rows = functional.linear(x, weight, backend="cpu")[:1]
        last = functional.attention(q, k, v, causal=True)[:, -1:]
        return (
            not torch.equal(functional.linear(x[:1], weight, backend="cpu"), rows),
            not torch.equal(functional.attention(q[:, -1:], k, v, causal=True), last),
        )

    assert rows_differ() == (False, False)
    with config.batch_invariant(False):
        assert rows_differ() == (True, True)
    assert config.BATCH_INVARIANT


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tokens_of_a_model_do_not_depend_on_the_batch_or_the_chunk(dtype):
    torch.manual_seed(0)
    config_ = LlamaConfig(vocab_size=50, dim=64, num_layers=2, num_heads=4, hidden_dim=96)
    model = config_.build().to(dtype).eval()
    tokens = torch.randint(50, (5, 24))
    with torch.no_grad():
        whole = model(tokens)
        assert torch.equal(model(tokens[3:4]), whole[3:4])
        state = model.new_state(5, 24)
        parts = [model(tokens[:, :9], state=state), model(tokens[:, 9:20], state=state)]
        parts += [model(tokens[:, t : t + 1], state=state) for t in range(20, 24)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_bad_values_are_refused():
    with pytest.raises(TypeError, match="batch_invariant: enabled must be a bool, got enabled=1"):
        config.batch_invariant(1)


def test_the_page_names_the_exceptions():
    page = (Path(__file__).parents[3] / "docs/batch_invariance.md").read_text(encoding="utf-8")
    listed = re.search(r"index of an element:\n\n(.*?)\.\n", page, re.DOTALL)[1]
    found = {name for name, spec in testing.registry().items() if not spec.batch_invariant}
    assert set(re.findall(r"`(\w+)`", listed)) == found
