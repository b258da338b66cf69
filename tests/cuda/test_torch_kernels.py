"""Paths of the CUDA kernels that call kernels of torch: which calls they take, and with what.

The emulator runs the CUDA side of the ops on the CPU, where torch has no such kernels: these tests
register stand-ins, which check their arguments against torch's meta kernels.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omniattn import functional, reference
from omniattn.checks.arguments import takes_own_kernels
from omniattn.encoding.attention import with_own_kernels
from omniattn.encoding.masks import MaskKind
from omniattn.ops import attention as ops
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch import torch_kernels
from omniattn.ops.dispatch.torch_kernels import KERNELS

EMULATED = "torch_flash" in _library.paths("cpu")["attention"]
emulated = pytest.mark.skipif(not EMULATED, reason="test_under_emulation runs these tests")


@pytest.mark.skipif(EMULATED, reason="this is the emulation")
@pytest.mark.parametrize("variant", ["value", "race"])
def test_under_emulation(variant: str) -> None:
    env = os.environ | {"OMNIATTN_CPU_LIBRARY": f"libomniattn_emulated_{variant}.so"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    assert " 2 skipped" in result.stdout  # this test


def on_meta(name: str, *args: Any, **options: Any) -> tuple[Any, ...]:
    """Results of torch's kernel for the meta device, which checks arguments as a GPU's."""

    def meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, Tensor) else x

    given = {key: meta(value) for key, value in options.items()}
    found: tuple[Any, ...] = getattr(torch.ops.aten, name).default(*map(meta, args), **given)
    return found


def same_kind(found: tuple[Tensor, ...], expected: tuple[Any, ...]) -> None:
    for mine, of_torch in zip(found, expected, strict=False):
        assert (mine.shape, mine.dtype) == (of_torch.shape, of_torch.dtype)


def window(causal: bool, options: dict[str, Any]) -> tuple[int, int]:
    left, right = options.get("window_size_left"), options.get("window_size_right")
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def attended(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, longest: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the inputs."""
    if cu is None:
        return reference.attention(q, k, v, return_lse=True, **options)
    return reference.attention_varlen(q, k, v, cu, cu, longest, longest, return_lse=True, **options)


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    longest, _, dropout, causal, debug = args
    assert dropout == 0 and not debug
    assert q.ndim == (3 if cu_q is not None else 4)
    if cu_q is not None:
        assert cu_q.dtype == torch.int32 and cu_q.data_ptr() == cu_k.data_ptr()
    size = window(causal, options)
    out, lse = attended(q, k, v, cu_q, longest, window_size=size, scale=options["scale"])
    out = torch.empty_like(q).copy_(out)
    expected = on_meta("_flash_attention_forward", q, k, v, cu_q, cu_k, *args, **options)
    same_kind((out, lse), expected)
    return out, lse, q.new_empty(2), q.new_empty(0), q.new_empty(0)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Any,
    cu_k: Any,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    longest, _, dropout, causal, *_ = args
    assert dropout == 0
    size, scale = window(causal, options), options["scale"]
    again, lse_again = attended(q, k, v, cu_q, longest, window_size=size, scale=scale)
    torch.testing.assert_close(lse, lse_again, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out, again, rtol=2e-2, atol=2e-2)
    if cu_q is None:
        found = gradients(grad, q, k, v, out, lse, size, scale)
    else:
        ends = cu_q.tolist()
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        pieces = [
            gradients(
                *(t[None, part] for t in (grad, q, k, v, out)), lse[None, :, part], size, scale
            )
            for part in parts
        ]
        found = tuple(torch.cat(each, 1)[0] for each in zip(*pieces, strict=True))
    expected = on_meta(
        "_flash_attention_backward", grad, q, k, v, out, lse, cu_q, cu_k, *args, **options
    )
    same_kind(found, expected)
    return found


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    size: tuple[int, int],
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v (B, T, H, D) from out and lse, in float32."""
    group = q.shape[2] // k.shape[2]
    g, x, o = (t.float().transpose(1, 2) for t in (grad, q, out))
    keys, values = (t.float().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    seen = functional.masks.SlidingWindow(*size).dense(q.shape[1], k.shape[1])
    p = torch.where(seen, (scale * x @ keys.mT - lse[..., None]).exp(), 0)
    ds = p * (g @ values.mT - (g * o).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ keys, ds.mT @ x, p.mT @ g
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return tuple(t.transpose(1, 2).contiguous().to(q.dtype) for t in (dq, dk, dv))


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, *args: Any, **options: Any
) -> tuple[Any, ...]:
    dropout, causal, debug = (*args, 0.0, False, False)[:3]  # without defaults at the end
    assert bias is None and with_lse and dropout == 0 and not debug
    rows = (t.transpose(1, 2) for t in (q, k, v))
    found, lse = reference.attention(*rows, causal=causal, return_lse=True, scale=options["scale"])
    out, lse = found.transpose(1, 2), lse[..., None]
    given = on_meta(
        "_scaled_dot_product_cudnn_attention", q, k, v, bias, with_lse, *args, **options
    )
    same_kind((out, lse), given)
    none = q.new_empty(0)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def grouped_mm(
    rows: Tensor, matrices: Tensor, ends: Tensor, bias: Any = None, dtype: Any = None
) -> Tensor:
    assert bias is None and dtype is None and ends.dtype == torch.int32
    out = rows.new_full((len(rows), matrices.shape[2]), torch.nan)  # after the last end, as a GPU's
    for n, (first, last) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        out[first:last] = rows[first:last] @ matrices[n]
    same_kind((out,), (torch._grouped_mm(rows.to("meta"), matrices.to("meta"), ends.to("meta")),))
    return out


STAND_INS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_grouped_mm": grouped_mm,
}


@pytest.fixture
def torch_has_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    taken = tuple(f"{op}:{path}" for op, path in KERNELS)
    with monkeypatch.context() as patch:
        patch.setattr("omniattn.config.TAKE_PATHS", taken)
        torch_kernels.find("cpu")
    torch.ops.omniattn.report_paths_cpu(True)
    yield
    torch.ops.omniattn.report_paths_cpu(False)
    library._destroy()
    torch_kernels.find("cpu")


def reported(capfd: pytest.CaptureFixture[str]) -> list[str]:
    prefix = "omniattn: "
    lines = capfd.readouterr().err.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def heads(
    tq: int = 40, tk: int = 40, h: int = 4, g: int = 4, d: int = 32, **options: Any
) -> list[Tensor]:
    return [rows(2, t, n, d, **options) for t, n in ((tq, h), (tk, g), (tk, g))]


#: Tq, Tk, kv heads, D, options, path of the forward.
TAKEN = {
    "plain": (40, 40, 4, 32, {}, "torch_cudnn"),
    "causal": (40, 40, 4, 32, {"causal": True}, "torch_cudnn"),
    "scaled": (40, 70, 2, 32, {"scale": 0.3}, "torch_cudnn"),
    "wide": (20, 24, 2, 160, {}, "torch_flash"),
    "longer": (20, 40, 2, 32, {"causal": True}, "torch_flash"),
    "window": (40, 48, 2, 32, {"causal": True, "window_size": (7, -1)}, "torch_flash"),
    "both sides": (40, 40, 4, 32, {"window_size": (3, 5)}, "torch_flash"),
    "wide window": (40, 40, 4, 32, {"causal": True, "window_size": (90, -1)}, "torch_cudnn"),
}


def compare(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Results and gradients equal those of our kernels."""

    def results() -> tuple[Tensor, ...]:
        out = call(*tensors)
        torch.manual_seed(0)
        return out, *torch.autograd.grad(out, tensors, torch.randn_like(out))

    found = results()
    with (
        torch_kernels.beginning_with("cpu", "attention", "stick"),
        torch_kernels.beginning_with("cpu", "attention_backward", "stick"),
    ):
        expected = results()
    for mine, ours in zip(found, expected, strict=True):
        assert mine.stride() == ours.stride()
        torch.testing.assert_close(mine, ours, rtol=4e-2, atol=4e-2)


@emulated
@pytest.mark.parametrize("name", TAKEN)
def test_torch_takes_plain_calls(
    name: str, torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    tq, tk, g, d, options, path = TAKEN[name]
    compare(lambda *x: functional.attention(*x, **options), heads(tq, tk, 4, g, d))
    forward, backward, *ours = reported(capfd)
    assert forward.split(" (")[0] == f"attention on cpu: {path}"
    assert backward == "attention_backward on cpu: torch_flash"
    assert [line.split(" (")[0].split(": ")[1] for line in ours] == ["mma", "mma"]


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_may_come_first_in_memory(dtype: torch.dtype, torch_has_kernels: None) -> None:
    """Results are contiguous, as compiled graphs expect."""
    leaves = [rows(2, 4, 40, 32, dtype=dtype) for _ in range(3)]
    compare(lambda *x: functional.attention(*(t.transpose(1, 2) for t in x)), leaves)


@emulated
@pytest.mark.parametrize("bounds", [(0, 7, 7, 60), (0, 60)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 0)}], ids=str)
def test_flash_takes_packed_sequences(
    bounds: tuple[int, ...],
    options: dict[str, Any],
    torch_has_kernels: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cu = torch.tensor(bounds, dtype=torch.int32)
    tensors = [rows(60, n, 32) for n in (4, 2, 2)]
    compare(
        lambda *x: functional.attention_varlen(*x, cu, cu, 60, 60, **options),
        tensors,
    )
    forward, backward, *_ = reported(capfd)
    assert forward.startswith("attention on cpu: torch_flash (torch_cudnn: ")
    assert backward == "attention_backward on cpu: torch_flash"


def _varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    cu_q, cu_k = torch.tensor([0, 30, 80]), torch.tensor([0, 40, 80])
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return functional.attention_varlen(q, k, v, cu_q, cu_k, 50, 40, **options)


def _cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.attention_cached(q, k, v, torch.tensor([40, 33]))


#: Reason -> sizes or dtype of q, k and v, the call.
REFUSED: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "q is not bfloat16 or float16": ({"dtype": torch.float32}, functional.attention),
    "the score has terms, sinks or another normalizer": (
        {},
        lambda *x: functional.attention(*x, sinks=torch.zeros(4)),
    ),
    "scale is not positive": ({}, lambda *x: functional.attention(*x, scale=-1.0)),
    "weights are dropped": (
        {},
        lambda *x: functional.attention(*x, dropout_p=0.5, seed=torch.tensor([1, 2])),
    ),
    "the mask is not one window": (
        {},
        lambda *x: functional.attention(*x, mask=functional.masks.Dilated(5, 2), causal=True),
    ),
    "some queries may see no key": (
        {"tq": 41, "tk": 40},
        lambda *x: functional.attention(*x, causal=True),
    ),
    "q, k and v have not one head size, a multiple of 8 up to 256": (
        {"d": 12},
        functional.attention,
    ),
    "rows of q, k or v do not start at multiples of 16 bytes": (
        {"d": 33},
        lambda *x: functional.attention(*(t[..., 1:] for t in x)),
    ),
    "packed queries and keys have different boundaries, or one row each": ({}, _varlen),
    "the sequences are those of a cache": ({}, _cached),
}


@emulated
@pytest.mark.parametrize("reason", REFUSED)
def test_other_calls_take_our_kernels(
    reason: str, torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes, call = REFUSED[reason]
    call(*heads(**sizes))
    [line] = reported(capfd)
    path, refusals = line.removeprefix("attention on cpu: ").split(" ", 1)
    assert path in ("mma", "fma")
    assert refusals == f"(torch_cudnn: {reason}; torch_flash: {reason})"


@emulated
def test_a_gradient_of_lse_takes_our_backward(
    torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = heads()
    out, lse = functional.attention(*tensors, return_lse=True)
    torch.autograd.grad((out, lse), tensors, (torch.ones_like(out), torch.ones_like(lse)))
    assert reported(capfd) == [
        "attention on cpu: torch_cudnn",
        "attention_backward on cpu: mma (torch_flash: lse has a gradient)",
    ]


@emulated
def test_a_call_may_ask_for_our_kernels(
    torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the functions do with backend="cuda" or torch's deterministic algorithms."""
    tensors = heads()
    mask = with_own_kernels([])
    out, _ = ops.attention(*tensors, [], None, mask, [], [0.5, 0.0])
    out.sum().backward()
    why = "kernels of this package are wanted"
    assert reported(capfd) == [
        f"attention on cpu: mma (torch_cudnn: {why}; torch_flash: {why})",
        f"attention_backward on cpu: mma (torch_flash: {why})",
    ]
    expected = ops.attention.formula(*tensors, [], None, mask, [], [0.5, 0.0])[0]
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


EXPERTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "interleaved": {"interleaved": True, "activation": "clamped_swiglu"},
    "no gate": {"activation": "gelu"},
    "biases": {"biased": True},
    "recomputed": {"recompute": True},
    "transposed": {"transposed": True},
}


def experts(
    activation: str = "swiglu",
    biased: bool = False,
    transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    width: int = 24,
    **options: Any,
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A call, and the tensors that it differentiates: expert 1 and some slots have no rows."""
    columns = 32 if activation == "gelu" else 64
    shapes = ((70, width), (3, columns, width), (3, width, 32))
    x, up, down = (torch.randn(shape).mul(0.5).to(dtype) for shape in shapes)
    if transposed:
        up, down = (t.mT.contiguous().mT for t in (up, down))
    index = torch.tensor([0, 2, -1]).repeat(70)[:140].view(70, 2)
    tensors = [x, torch.rand(70, 2), up, down]
    if biased:
        tensors += [torch.randn(shape).to(dtype) for shape in ((3, columns), (3, width))]

    def call(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        given = dict(zip(("up_bias", "down_bias"), biases, strict=False))
        return functional.moe_experts(
            x, index, weights, up, down, activation=activation, **given, **options
        )

    return call, [t.requires_grad_() for t in tensors]


@emulated
@pytest.mark.parametrize("name", EXPERTS)
def test_torch_multiplies_for_experts(
    name: str, torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    call, tensors = experts(**EXPERTS[name])

    def results() -> tuple[Tensor, ...]:
        y = call(*tensors)
        torch.manual_seed(0)
        return y, *torch.autograd.grad(y, tensors, torch.randn_like(y))

    found = results()
    with torch_kernels.beginning_with("cpu", "moe_experts", "mma"):
        expected = results()
    paths = ("torch_grouped_mm", "torch_grouped_mm", "mma", "mma")
    assert reported(capfd) == [f"moe_experts on cpu: {path}" for path in paths]
    for mine, ours in zip(found, expected, strict=True):
        size = float(ours.detach().float().abs().max())
        torch.testing.assert_close(mine, ours, rtol=2e-2, atol=1e-2 * size)


REFUSED_EXPERTS: dict[str, dict[str, Any]] = {
    "rows or weights are not 16-bit in whole 16 bytes": {"width": 20},
    "x is not bfloat16": {"dtype": torch.float16},
}


@emulated
@pytest.mark.parametrize("reason", REFUSED_EXPERTS)
def test_other_experts_take_our_kernels(
    reason: str, torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    call, tensors = experts(**REFUSED_EXPERTS[reason])
    call(*tensors)
    [line] = reported(capfd)
    assert line.endswith(f" (torch_grouped_mm: {reason})")


@emulated
def test_experts_may_ask_for_our_kernels(
    torch_has_kernels: None, capfd: pytest.CaptureFixture[str]
) -> None:
    call, tensors = experts()
    with pytest.MonkeyPatch.context() as patch:
        where = "omniattn.functional.layers.moe.takes_own_kernels"
        patch.setattr(where, lambda backend, x: True)
        call(*tensors).sum().backward()
    why = "kernels of this package are wanted"
    assert reported(capfd) == [f"moe_experts on cpu: mma (torch_grouped_mm: {why})"] * 2


@emulated
def test_torch_gets_no_boundaries_that_are_wrong(torch_has_kernels: None) -> None:
    tensors = [rows(60, 4, 32) for _ in range(3)]
    cu = torch.tensor([0, 40, 30, 60], dtype=torch.int32)
    heads_of_batch = [t[None] for t in tensors]
    with pytest.raises(RuntimeError, match="cu_seqlens_q must grow"):  # functions check it before
        ops.attention(*heads_of_batch, [cu, cu], None, [MaskKind.PACKED, 60, 60, 0], [], [0.5, 0.0])


@emulated
def test_torch_lacks_kernels_for_the_cpu() -> None:
    found = torch_kernels.omitted("cpu")
    assert found.keys() == KERNELS.keys()
    assert "has no _flash_attention_forward for device cpu" in found["attention", "torch_flash"]
    assert (
        "OMNIATTN_TAKE_PATHS=attention_backward:torch_flash"
        in (found["attention_backward", "torch_flash"])
    )


@emulated
def test_variables_choose_paths() -> None:
    env = os.environ | {"OMNIATTN_OMIT_PATHS": "attention:mma,attention:torch_flash"}
    script = (
        "import torch; from omniattn import functional; x = torch.ones(1, 40, 2, 32).bfloat16();"
        "functional.attention(x, x, x)"
    )
    env["OMNIATTN_LOG_PATHS"] = "1"
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert result.stderr == "omniattn: attention on cpu: fma\n"


@pytest.mark.parametrize(("backend", "deterministic"), [("cuda", False), (None, True)])
def test_functions_ask_for_our_kernels(backend: str | None, deterministic: bool) -> None:
    """On CUDA; on the meta device, which stands in for it, no call names a backend."""
    q = torch.empty(1, 2, 1, 8, device="meta")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert takes_own_kernels(backend, q)
        assert not takes_own_kernels(None, torch.empty(0))
    finally:
        torch.use_deterministic_algorithms(before)
    assert not takes_own_kernels(None, q)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention: path must be one of .*, got path='fast'"):
        torch_kernels.omit("cpu", "attention", "fast", "a test")
    last = _library.paths("cpu")["attention"][-1]
    with pytest.raises(ValueError, match="path must be one of"):
        torch_kernels.omit("cpu", "attention", last, "a test")
