"""Recurrences in chunks on tensor cores: which calls take that path of CUDA, and that their results
are those of fp64 at strong decays and odd sizes. The emulator runs the kernels on the CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recurrence_cases import draw
from torch.nn import functional as nnf

from omniattn import functional as F

EMULATED = "emulated" in os.environ.get("OMNIATTN_CPU_LIBRARY", "")
emulated = pytest.mark.skipif(not EMULATED, reason="test_under_emulation runs these tests")

ROOT = Path(__file__).parents[2]
FORWARD, BACKWARD = "recurrence: {}", "recurrence_backward: {}"
#: Bound on the relative error (root mean square) of splitting numbers into pieces.
LEFT_OUT = 2.0**-15


@pytest.mark.skipif(EMULATED, reason="this is the emulation")
@pytest.mark.parametrize("variant", ["value", "race"])
def test_under_emulation(variant: str) -> None:
    """With the tests of the tiles of CPUs, whose products are the same."""
    files = [__file__]
    if variant == "value":
        files.append(str(ROOT / "tests/ops/recurrences/test_recurrence_tiles.py"))
    env = os.environ | {"OMNIATTN_CPU_LIBRARY": f"libomniattn_emulated_{variant}.so"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not levels_differ"]
    result = subprocess.run([*command, *files], env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    assert " 2 skipped" in result.stdout  # this test


@pytest.fixture
def taken(capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Paths of the calls of a test, when it has ended."""
    found: list[str] = []
    torch.ops.omniattn.report_paths_cpu(True)
    yield found
    torch.ops.omniattn.report_paths_cpu(False)
    lines = capfd.readouterr().err.splitlines()
    assert [x.removeprefix("omniattn: ").replace(" on cpu", "") for x in lines] == found


def inputs(steps, heads, v_heads, size, width, batch=2, dtype=torch.bfloat16):
    """q, k, v and beta of fp64: the first three are numbers of `dtype`."""
    q, k = draw(batch, steps, heads, size), draw(batch, steps, heads, size, seed=1)
    v = draw(batch, steps, v_heads, width, seed=2)
    q, k, v = (t.to(dtype).double() for t in (q, nnf.normalize(k, dim=-1), v))
    return q, k, v, draw(batch, steps, v_heads, seed=4).sigmoid().float().double()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the mean of squares."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def results(delta, q, k, v, g, beta, start, *, dtype, cu_seqlens=None):
    """o, the final state and the gradients of all inputs, in `dtype` and fp32 or of fp64."""
    leaves = [q, k, v, g, *([beta] if delta else []), start]
    half = dtype != torch.float64
    leaves = [t.to(dtype) if half and n < 3 else t.float() if half else t
              for n, t in enumerate(leaves)]  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in leaves]
    rule = F.gated_linear_attention
    if delta:
        rule = F.kimi_delta_attention if g.dim() == 4 else F.gated_delta_rule
    o, final = rule(*leaves[:-1], initial_state=leaves[-1], cu_seqlens=cu_seqlens,
                    backend=None if half else "reference")  # fmt: skip
    weight, of_final = draw(*o.shape, seed=6).bfloat16(), draw(*final.shape, seed=7).float()
    loss = (o.double() * weight.double()).sum() + (final.double() * of_final.double()).sum()
    return [o, final, *torch.autograd.grad(loss, leaves)]


def assert_results(delta, *given, dtype=torch.bfloat16, cu_seqlens=None):
    """No more than a rounding to the dtype of each result and what pieces leave out."""
    found, exact = (
        results(delta, *given, dtype=t, cu_seqlens=cu_seqlens) for t in (dtype, torch.float64)
    )
    for n, (a, b) in enumerate(zip(found, exact, strict=True)):
        if b.norm() > 0:
            assert error(a, b) < error(b.to(a.dtype), b) + LEFT_OUT, n
        else:
            assert a.norm() == 0, n


@emulated
@pytest.mark.parametrize(
    ("path", "steps", "size", "width", "dtype"),
    [
        ("mma", 17, 8, 8, torch.bfloat16),
        ("mma", 70, 128, 136, torch.bfloat16),
        ("tokens", 16, 64, 64, torch.bfloat16),
        ("tokens", 70, 136, 64, torch.bfloat16),
        ("tokens", 70, 20, 64, torch.bfloat16),
        ("tokens", 70, 64, 20, torch.bfloat16),
        ("mma", 70, 64, 64, torch.float16),
        ("tokens", 70, 64, 64, torch.float32),
    ],
)
def test_paths(taken, path, steps, size, width, dtype):
    q, k, v, beta = inputs(steps, 1, 1, size, width, batch=1)
    q = q.to(dtype).requires_grad_()
    F.delta_rule(q, k.to(dtype), v.to(dtype), beta.float())[0].sum().backward()
    taken += [FORWARD.format(path), BACKWARD.format(path)]


@emulated
def test_rows_that_are_not_whole_pieces_go_by_tokens(taken):
    q, k, v, _ = (t.bfloat16() for t in inputs(40, 1, 1, 16, 16))
    wide = torch.zeros(*q.shape[:-1], 20, dtype=q.dtype)
    wide[..., 2:18] = q
    g = nnf.logsigmoid(draw(2, 40, 1)).float()
    found = F.gated_linear_attention(wide[..., 2:18], k, v, g)
    expected = F.gated_linear_attention(q, k, v, g)
    for a, b in zip(found, expected, strict=True):
        assert error(a, b.double()) < 2**-8
    taken += [FORWARD.format("tokens"), FORWARD.format("mma")]


@emulated
@pytest.mark.parametrize(
    ("path", "steps", "size", "dtype"),
    [
        ("mma", 9, 8, torch.bfloat16),
        ("mma", 40, 128, torch.float16),
        ("tokens", 8, 16, torch.bfloat16),
        ("tokens", 40, 136, torch.float16),
        ("tokens", 40, 16, torch.float32),
    ],
)
def test_paths_of_decays_per_channel(taken, path, steps, size, dtype):
    q, k, v, _ = (t.to(dtype) for t in inputs(steps, 1, 1, size, 16))
    q.requires_grad_()
    F.gated_linear_attention(q, k, v, -torch.rand(2, steps, 1, size))[0].sum().backward()
    taken += [FORWARD.format(path), BACKWARD.format(path)]


#: Logarithms of decays by token: none survives; one in five ends all before it; sums beyond what
#: fp32 can tell apart; no decay.
DECAYS = {
    "all": lambda t: torch.full_like(t, -1e30),
    "infinite": lambda t: torch.where(t > 1, -torch.inf, -t.abs()),
    "some": lambda t: torch.where(t > 0.8, -500.0, -1e-3 * t.abs()),
    "uneven": lambda t: -(t.abs() ** 8) * 1e3,
    "none": torch.zeros_like,
}


@emulated
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strong_decays(taken, channels, dtype, decay, delta):
    q, k, v, beta = inputs(75, 1, 2, 24, 40, dtype=dtype)
    of_channels = [24] if channels else []
    g = DECAYS[decay](draw(2, 75, 2, *of_channels, seed=3)).float().double()
    start = draw(2, 2, 24, 40, seed=8).float().double()
    assert_results(delta, q, k, v, g, beta, start, dtype=dtype)
    taken += [FORWARD.format("mma"), BACKWARD.format("mma")]


@emulated
@pytest.mark.parametrize(("size", "width"), [(8, 8), (40, 72), (72, 24), (128, 104)])
@pytest.mark.parametrize("steps", [17, 32, 97])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_sizes(taken, channels, dtype, steps, size, width):
    """Parts of a panel and of a chunk, value heads that share keys."""
    q, k, v, beta = inputs(steps, 2, 4, size, width, dtype=dtype)
    of_channels = [size] if channels else []
    g = nnf.logsigmoid(3 * draw(2, steps, 4, *of_channels, seed=3)).float().double()
    start = draw(2, 4, size, width, seed=8).float().double()
    assert_results(True, q, k, v, g, beta, start, dtype=dtype)
    taken += [FORWARD.format("mma"), BACKWARD.format("mma")]


@emulated
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_sequences(taken, dtype, delta):
    """With a decay per channel: of one token, none, few tokens and several chunks."""
    q, k, v, beta = inputs(120, 2, 4, 24, 40, batch=1, dtype=dtype)
    g = nnf.logsigmoid(3 * draw(1, 120, 4, 24, seed=3)).float().double()
    start = draw(5, 4, 24, 40, seed=8).float().double()
    bounds = torch.tensor([0, 1, 1, 4, 70, 120])
    assert_results(delta, q, k, v, g, beta, start, dtype=dtype, cu_seqlens=bounds)
    taken += [FORWARD.format("mma"), BACKWARD.format("mma")]
