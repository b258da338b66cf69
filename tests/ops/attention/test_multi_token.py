"""multi_token_attention: the public formula, blocks, leading queries, gradients, memory, errors."""

import itertools
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from omniattn.compositions.attention import multi_token
from omniattn.functional import attention, multi_token_attention
from omniattn.testing import isa, isas, poisoned_memory, threads

F64 = torch.float64


def inputs(tq=20, tk=20, heads=4, kv_heads=2, cq=3, ck=5, size=2):
    make = torch.Generator().manual_seed(0)
    shapes = [(2, tq, heads, 8), (2, tk, kv_heads, 8), (2, tk, kv_heads, 6), (heads, cq, ck)]
    shapes += [(heads // size, size, size)]
    return [torch.randn(shape, generator=make, dtype=F64) for shape in shapes]


def by_matrices(q, k, v, weight, head_weight, causal=True):
    """As in projects/mta/mta_transformer.py of facebookresearch/RAM at commit 0372dab.

    There, queries without keys give NaN; here they give 0.
    """
    group, (heads, cq, ck) = q.shape[2] // k.shape[2], weight.shape
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    hidden = torch.ones(scores.shape[-2:]).triu(1 + scores.shape[-1] - scores.shape[-2]).bool()
    hidden &= causal
    padded = nn.functional.pad(scores.masked_fill(hidden, 0), (ck // 2, ck // 2, cq - 1, 0))
    scores = nn.functional.conv2d(padded, weight[:, None], groups=heads)
    empty = hidden.all(-1, keepdim=True)
    p = scores.masked_fill(hidden & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0)
    mixed = [
        torch.einsum("bcij,co->boij", part, own)
        for part, own in zip(p.split(head_weight.shape[1], 1), head_weight, strict=True)
    ]
    return torch.einsum("bhij,bjhd->bihd", torch.cat(mixed, 1), v)


def gradients(function, given):
    leaves = [t.clone().requires_grad_() for t in given]
    out = function(*leaves)
    weight = torch.arange(out.numel(), dtype=F64).cos().view_as(out)
    return [out, *torch.autograd.grad(out, leaves, weight)]


@pytest.fixture(params=["kernel", 3, 7, 32])
def form(request, monkeypatch):
    """The kernels of the CPU, or the composition of other devices with blocks of some rows."""
    if request.param == "kernel":
        yield
        return
    monkeypatch.setattr(multi_token, "_ROWS", request.param)
    monkeypatch.setattr(multi_token, "_LOGITS", 1)
    library = torch.library.Library("omniattn", "IMPL")
    names = ("multi_token_attention", "multi_token_attention_raw", "multi_token_attention_backward")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in names:
            kernel = multi_token._backward if name.endswith("backward") else multi_token._forward
            library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tk": 33},
        {"tk": 9},
        {"cq": 6, "ck": 11, "size": 4},
        {"cq": 1, "ck": 1},
        {"kv_heads": 4, "size": 1},
        {"heads": 6, "kv_heads": 2, "size": 2},
        {"heads": 6, "kv_heads": 3, "size": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_the_public_formula(form, causal, sizes):
    assert_is_the_formula(causal, sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tq": 75, "tk": 300, "cq": 6, "ck": 11},
        {"tq": 65, "tk": 129, "heads": 2, "kv_heads": 1, "cq": 40, "ck": 31},
        {"tq": 161, "tk": 140, "cq": 5, "ck": 1, "size": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("level", isas())
def test_blocks_and_tiles_of_the_kernels(level, causal, sizes):
    with isa(level), poisoned_memory():
        assert_is_the_formula(causal, sizes)
        q, k, v, weight, heads = inputs(**sizes)
        given = [q, k, v, weight * weight[0].numel() ** -0.5, heads]
        want = gradients(lambda *t: by_matrices(*t, causal=causal), given)
        single = [t.float() for t in given]
        got = gradients(lambda *t: multi_token_attention(*t, causal=causal), single)
        for mine, other in zip(got, want, strict=True):
            assert (mine - other).norm() <= 16 * torch.finfo(torch.float32).eps * other.norm()


def assert_is_the_formula(causal, sizes):
    given = inputs(**sizes)
    got = gradients(lambda *t: multi_token_attention(*t, causal=causal), given)
    want = gradients(lambda *t: by_matrices(*t, causal=causal), given)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_single_taps_without_mixing_are_attention():
    q, k, v, *_ = inputs()
    one = torch.zeros(4, 3, 5, dtype=F64)
    one[:, -1, 2] = 1
    torch.testing.assert_close(multi_token_attention(q, k, v, one), attention(q, k, v, causal=True))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_leading_queries_continue_a_sequence(backend):
    q, k, v, *weights = inputs(cq=4)
    whole = multi_token_attention(q, k, v, *weights, backend=backend)
    for first, last in ((0, 1), (1, 2), (2, 9), (9, 20)):
        lead = min(3, first)
        part = multi_token_attention(
            *(q[:, first - lead : last], k[:, :last], v[:, :last], *weights),
            lead=lead,
            backend=backend,
        )
        torch.testing.assert_close(part, whole[:, first:last])


def test_any_subset_of_gradients_on_any_number_of_threads():
    given = [t.float() for t in inputs(tq=70, tk=90)]
    whole = gradients(multi_token_attention, given)[1:]
    grad = torch.arange(2 * 70 * 4 * 6, dtype=F64).cos().view(2, 70, 4, 6).float()
    for wanted in itertools.product((False, True), repeat=5):
        leaves = [t.clone().requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
        needed = [t for t in leaves if t.requires_grad]
        with threads(1 + sum(wanted) % 3):
            out = multi_token_attention(*leaves)
            found = torch.autograd.grad(out, needed, grad) if needed else ()
        expected = itertools.compress(whole, wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


_PEAK = """
import resource, torch
from omniattn.functional import multi_token_attention

def run(tokens):
    q, k, v = (torch.randn(1, tokens, 4, 16, requires_grad=True) for _ in range(3))
    weight = torch.randn(4, 3, 5, requires_grad=True)
    multi_token_attention(q, k, v, weight, torch.randn(2, 2, 2)).sum().backward()

torch.set_num_threads(2)
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_grows_linearly():
    """The logits of all pairs of 8192 tokens and 4 heads would take 1 GiB."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    row = 4 * 16 * 4  # bytes of q of a token
    assert 1024 * int(done.stdout) <= 8192 * 64 * row


def test_errors():
    q, k, v, weight, heads = inputs()
    for wrong, message in (
        ((weight[:3],), r"weight must have shape \(4, 3, 5\), got weight.shape=\(3, 3, 5\)"),
        ((weight[0],), r"weight must have shape \(4, 1, 1\), got weight.shape=\(3, 5\)"),
        ((weight[..., :4],), r"weight must have shape \(Hq, cq >= 1, odd ck\), got .*\(4, 3, 4\)"),
        ((weight[:, :0],), r"weight must have shape \(Hq, cq >= 1, odd ck\), got .*\(4, 0, 5\)"),
        ((weight, heads[:1]), r"head_weight must have shape \(2, 2, 2\), got .*=\(1, 2, 2\)"),
        ((weight, q.new_ones(1, 3, 3)), r"head_weight must .* divisor of Hq=4, got .*\(1, 3, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"multi_token_attention: {message}"):
            multi_token_attention(q, k, v, *wrong)
    with pytest.raises(ValueError, match="lead must be an int >= 0 and <= 20, got lead=21"):
        multi_token_attention(q, k, v, weight, lead=21)
    with pytest.raises(TypeError, match=r"multi_token_attention: weight must .*weight.dtype="):
        multi_token_attention(q, k, v, weight.float())
