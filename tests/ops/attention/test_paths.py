"""Tables of paths: what they list, and that the path which a call takes is reported on request."""

from collections.abc import Iterator

import pytest
import torch

from omniattn.functional import attention, attention_varlen, moe_experts
from omniattn.ops.dispatch import library as _library
from omniattn.testing import threads

#: The kernels of CUDA under emulation (tests/cuda), or those of the CPU.
EMULATED = "mma" in _library.paths("cpu")["attention"]
if EMULATED:
    TABLES = {
        "attention": ["split", "torch_cudnn", "torch_flash", "stick", "mma", "fma"],
        "attention_backward": ["torch_flash", "stick", "mma", "fma"],
        "moe_experts": ["torch_grouped_mm", "mma", "fma"],
    }
else:
    TABLES = {
        "attention": ["decode", "heads", "blocks"],
        "attention_backward": ["heads", "blocks"],
        "attention_weights": ["rows", "blocks"],
    }

#: B, Tq, Tk, dtype, forward, backward
CPU = [
    (1, 1, 64, torch.float32, "decode", "blocks"),
    (1, 128, 128, torch.float32, "blocks", "blocks"),
    (4, 32, 32, torch.float32, "heads", "heads"),
]
CUDA = [
    (1, 1, 64, torch.float32, "split", "fma"),
    (1, 70, 70, torch.float32, "fma", "fma"),
    (1, 70, 70, torch.bfloat16, "mma", "mma"),
]


@pytest.fixture
def reports() -> Iterator[None]:
    torch.ops.omniattn.report_paths_cpu(True)
    with threads(1):
        yield
    torch.ops.omniattn.report_paths_cpu(False)


def _taken(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("omniattn: ") for line in capfd.readouterr().err.splitlines()]


def _rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_tables() -> None:
    assert _library.paths("cpu").items() >= TABLES.items()


def test_nothing_is_reported_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    q = _rows(1, 8, 2, 16)
    attention(q, q, q)
    assert _taken(capfd) == []


@pytest.mark.parametrize(
    ("batch", "tq", "tk", "dtype", "forward", "backward"), CUDA if EMULATED else CPU
)
def test_reported_path(
    batch: int,
    tq: int,
    tk: int,
    dtype: torch.dtype,
    forward: str,
    backward: str,
    reports: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Few queries decode; on the CPU enough heads for the threads run each by itself."""
    q, k = (_rows(batch, t, 2, 16, dtype=dtype) for t in (tq, tk))
    attention(q, k, k).sum().backward()
    assert _taken(capfd) == [
        f"attention on cpu: {forward}",
        f"attention_backward on cpu: {backward}",
    ]


def test_sequences_take_paths_of_their_own(
    reports: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the CPU; kernels of CUDA run all of them at once."""
    q = _rows(129, 2, 16)
    cu_seqlens = torch.tensor([0, 1, 129], dtype=torch.int32)
    attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 128, 128)
    taken = ["fma"] if EMULATED else ["decode", "blocks"]
    assert _taken(capfd) == [f"attention on cpu: {name}" for name in taken]


@pytest.mark.parametrize(
    ("dtype", "width", "path"),
    [(torch.bfloat16, 16, "mma"), (torch.bfloat16, 12, "fma"), (torch.float32, 16, "fma")],
    ids=str,
)
def test_path_of_experts(
    dtype: torch.dtype,
    width: int,
    path: str,
    reports: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Tensor cores take rows of whole 16 bytes, in both passes; the CPU has one path."""
    x, up = _rows(3, width, dtype=dtype), _rows(2, 32, width, dtype=dtype)
    down, weights = _rows(2, width, 16, dtype=dtype), _rows(3, 1)
    index = torch.tensor([[0], [1], [1]])
    moe_experts(x, index, weights, up, down).sum().backward()
    assert _taken(capfd) == [f"moe_experts on cpu: {path}"] * 2 * EMULATED
