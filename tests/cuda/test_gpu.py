"""The CUDA kernels on a GPU: OpSpecs against the CPU, graphs, wrappers. The last need none."""

import ast
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniattn import functional
from omniattn.ops.dispatch import library as _library
from omniattn.testing import Random, on_device, registry
from omniattn.testing.spec import output_gradients
from omniattn.testing.table import COMMON_CUDA

needs_gpu = pytest.mark.skipif("cuda" not in _library.loaded, reason="no GPU, or no CUDA library")

ROOT = Path(__file__).parents[2]
SPECS = [spec for spec in registry().values() if spec.cuda != "planned"]
PROPERTIES = (
    *("forward", "derivatives", "each_gradient", "strided", "far", "poisoned", "deterministic"),
    *("expanded_gradient", "gradcheck", "opcheck", "compiled", "exported", "checkpointed"),
    *("autocast", "transforms"),
)
FIXTURES = (
    *("reverse", "pipeline", "exchange", "handover", "shuffle", "pending_copy", "vector_store"),
)
#: Calls whose values only the GPU knows to be out of range.
OUT_OF_RANGE = {
    "apply_rotary, qk_norm_rotary: positions must be in": """
        table = torch.ones(4, 2, device="cuda")
        x = torch.ones(1, 4, 1, 4, device="cuda")
        F.apply_rotary(x, None, table, table, positions=torch.arange(1, 5, device="cuda"))
    """,
    "cross_entropy: target must be in": """
        F.cross_entropy(torch.ones(2, 3, device="cuda"), torch.tensor([0, 3], device="cuda"))
    """,
    "attention_varlen: cu_seqlens_k must grow": """
        q = torch.ones(4, 1, 8, device="cuda")
        cu, longer = (torch.tensor([0, n], device="cuda") for n in (4, 5))
        F.attention_varlen(q, q, q, cu, longer, max_seqlen_q=4, max_seqlen_k=5)
    """,
    "attention_cached: cache_seqlens must lie in": """
        q = torch.ones(1, 4, 1, 8, device="cuda")
        F.attention_cached(q, q, q, torch.tensor([5], device="cuda"))
    """,
    "moe_experts: index must be in": """
        x, up = torch.ones(1, 2, device="cuda"), torch.ones(3, 4, 2, device="cuda")
        index, weights = torch.tensor([[3]], device="cuda"), torch.ones(1, 1, device="cuda")
        F.moe_experts(x, index, weights, up, torch.ones(3, 2, 2, device="cuda"))
    """,
}


@needs_gpu
@pytest.mark.parametrize("op", [spec.name for spec in SPECS])
def test_ops_pass_their_specs(op):
    selection = f"({' or '.join(PROPERTIES)}) and -{op}-"
    command = [sys.executable, "-m", "pytest", "-p", "on_device", "-p", "no:cacheprovider", "-q"]
    command += ["-k", selection, str(ROOT / "tests/ops/test_specs.py")]
    env = os.environ | {
        "OMNIATTN_TEST_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/cuda"), *filter(None, sys.path)]),
    }
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_forward_and_backward_are_captured_in_a_graph(spec, dtype):
    """A replay computes on new inputs what a call computes."""
    with on_device("cuda"):
        first, second = (spec.call(spec.cases[1], dtype) for _ in range(2))
        for t in second.tensors.values():
            if t.is_floating_point():
                t.mul_(0.5)
        grads = output_gradients(second.run(spec.function))
        expected = (*second.run(spec.function), *second.gradients(spec.function, grads))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first.gradients(spec.function, grads)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = (*first.run(spec.function), *first.gradients(spec.function, grads))
        for name, t in first.tensors.items():
            t.copy_(second.tensors[name])
        graph.replay()
        torch.cuda.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_ops_run_on_the_gpu_of_their_inputs(spec):
    """While another one is current."""
    with on_device("cuda"):
        here, there = (
            spec.call(spec.cases[1], torch.float32, device=torch.device("cuda", index))
            for index in (torch.cuda.current_device(), torch.cuda.device_count() - 1)
        )
        expected, actual = (
            (*call.run(spec.function), *call.gradients(spec.function)) for call in (here, there)
        )
    for a, e in zip(actual, expected, strict=True):
        assert a.device != e.device
        assert torch.equal(a.cpu(), e.cpu())


@needs_gpu
def test_a_replay_reads_the_seed_of_dropout_again():
    q = torch.randn(1, 64, 2, 32, device="cuda")
    seed = torch.tensor([1, 0], device="cuda")
    call = functools.partial(functional.attention, q, q, q, dropout_p=0.5, seed=seed)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    seed.copy_(torch.tensor([2, 3]))
    graph.replay()
    expected = functional.attention(q, q, q, dropout_p=0.5, seed=torch.tensor([2, 3]))
    assert torch.equal(out, expected)


@needs_gpu
@pytest.mark.parametrize("message", OUT_OF_RANGE)
def test_a_value_out_of_range_stops_the_kernel(message):
    lines = [line.strip() for line in OUT_OF_RANGE[message].strip().splitlines()]
    script = ["import torch", "import omniattn.functional as F", *lines, "torch.cuda.synchronize()"]
    command = [sys.executable, "-c", "\n".join(script)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr and message in result.stderr


def fixtures():
    path = _library.find("libgpu_fixtures.so")
    assert path is not None, "the development build has the fixtures where nvcc is"
    library = ctypes.CDLL(str(path))
    library.run_fixture.restype = library.run_matmul.restype = ctypes.c_char_p
    return library


@needs_gpu
@pytest.mark.parametrize("kernel", FIXTURES)
def test_wrappers_synchronise_and_copy(kernel):
    x = torch.arange(128, dtype=torch.float32, device="cuda")
    y = torch.full_like(x, -1)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    torch.cuda.synchronize()
    assert fixtures().run_fixture(kernel.encode(), False, 0, *pointers) == b""
    if kernel in ("reverse", "pipeline"):
        assert torch.equal(y, x.flip(0))
    elif kernel == "handover":
        assert torch.equal(y, x[:32].repeat(4))
    else:
        assert torch.equal(y.sort().values, x)


@needs_gpu
@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_matrix_wrappers_multiply(kind):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]
    shapes = ((16, 8), (8, 8)) if kind == "tf32" else ((16, 16), (16, 16))
    # Small integers: exact in every format.
    a, b = (torch.randint(-4, 5, s, device="cuda").to(dtype) for s in shapes)
    c = torch.empty(16, b.shape[1], device="cuda")
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
    torch.cuda.synchronize()
    assert fixtures().run_matmul(kind.encode(), *pointers) == b""
    assert torch.equal(c, a.float() @ b.float())


class Undrawn(Random):
    """Shapes of inputs, on the default device: the meta device has no generator."""

    def __init__(self, name, dtype):
        self.dtype, self.generator = dtype, None


@pytest.mark.parametrize("op", [s.name for s in SPECS if s.name != "attention_varlen"])
def test_inputs_are_drawn_on_the_default_device(op):
    """The benchmark draws inputs on the device, since copying them takes longer than timing the op.
    The shapes of packed sequences depend on values."""
    spec = registry()[op]
    case = spec.cases[0]
    with torch.device("meta"):
        tensors = spec.inputs(case, Undrawn(case.name, torch.float32))
    assert {t.device.type for t in tensors.values()} == {"meta"}


def test_the_docs_say_of_every_op_whether_a_gpu_has_run_it():
    page = (ROOT / "docs/ops.md").read_text()
    assert f"- has `{COMMON_CUDA}` CUDA kernels" in page
    others = dict(re.findall(r"^\| `(\w+)` \| .*CUDA: (\w+) \|$", page, re.MULTILINE))
    listed = re.findall(r"\[`(\w+)`\]\(\.\./python", page)
    assert {name: others.get(name, COMMON_CUDA) for name in listed} == {
        spec.name: spec.cuda for spec in registry().values()
    }


#: Modules that a machine rented by the hour may lack: the extras of this package and its
#: development module. It may lack git too.
ABSENT = ("expecttest", "hypothesis", "matplotlib", "pandas", "tqdm", "omniattn._kernels")
BENCHMARK = f"""
import os, sys, time
sys.modules |= dict.fromkeys({ABSENT})
sys.path.insert(0, "{ROOT / "benchmarks"}")
import torch
import gpu
"""
#: Breaks three ops: one raises, one hangs on the sizes of the dry run, one crashes in bf16.
BROKEN = """
from omniattn import functional
def fails(*args, **kwargs):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def hangs(x, *args, lost=functional.linear_cross_entropy, **kwargs):
    while len(x) == 8:
        time.sleep(1)
    return lost(x, *args, **kwargs)
def crashes(scores, *args, works=functional.top_k, **kwargs):
    if scores.dtype == torch.bfloat16:
        os.abort()
    return works(scores, *args, **kwargs)
functional.apply_rotary = fails
functional.linear_cross_entropy = hangs
functional.top_k = crashes
"""
#: Fails as CUDA does in a forked child of a process that used it; a new process fails too.
POISONED = """
from gpu_steps import steps
def ready(*args):
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
steps.ready = ready
"""


@pytest.fixture
def run_dry(tmp_path):
    """benchmarks/gpu.py on the CPU, in a process that `prelude` has changed: its rows and code."""

    def run(prelude, *arguments, **variables):
        script = BENCHMARK + prelude + "gpu.main()"
        command = [sys.executable, "-c", script, "--dry-run", "--results", str(tmp_path)]
        env = os.environ | {"PATH": str(tmp_path)} | variables
        result = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)
        path = tmp_path / "dry-run.jsonl"
        assert path.exists(), result.stdout[-3000:] + result.stderr[-3000:]
        return [json.loads(line) for line in path.read_text().splitlines()], result.returncode

    return run


def test_the_script_for_a_gpu_runs_dry(run_dry, tmp_path):
    """All steps, with something in the place of compute-sanitizer that finds a race."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\n[ $2 = racecheck ] && echo "a race" && exit 9\n[ $2 = memcheck ] || exit 0\n'
        'while [ $1 != 9 ]; do shift; done; shift; exec "$@"\n'
    )
    tool.chmod(0o755)
    rows, code = run_dry("", "--op", "linear_cross_entropy")
    assert code == 1
    assert rows[0]["commit"] == "unknown" and rows[0]["start"] == "fork"
    failed = [row for row in rows if "error" in row]
    assert {row["case"] for row in failed} == {"racecheck"}
    assert all("exit code 9: a race" in row["message"] for row in failed)
    steps = dict.fromkeys(row["step"] for row in rows)
    assert list(steps) == ["machine", "wrappers", "specs", "timing", "sanitizers", "profile"]
    assert {row["op"] for row in rows[1:]} == {"linear_cross_entropy"}
    providers = {row["provider"] for row in rows if row["step"] == "timing"}
    assert {"ours", "aten"} <= providers and not providers & {"compiled", "flex"}


def test_a_case_that_fails_hangs_or_crashes_ends_alone(run_dry):
    ops = ("apply_rotary", "linear_cross_entropy", "top_k", "layer_norm")
    steps = ("--only", "wrappers", "timing", "--timeout", "10")
    rows, code = run_dry(BROKEN, *steps, "--op", *ops)
    assert code == 1
    timed = {row["op"]: row for row in rows if row["step"] == "timing" and "missing" not in row}
    assert timed["apply_rotary"]["error"] == "RuntimeError"
    assert "illegal memory access" in timed["apply_rotary"]["message"]
    assert timed["linear_cross_entropy"]["error"] == "Timeout"
    assert timed["layer_norm"]["milliseconds"] > 0 and timed["top_k"]["milliseconds"] > 0
    tiny = {(row["op"], row["dtype"]): row for row in rows if row["step"] == "wrappers"}
    assert tiny["top_k", "bf16"]["error"] == "Crash"
    assert not any("error" in tiny["top_k", dtype] for dtype in ("f64", "f32", "f16"))
    assert all("error" in row for (op, _), row in tiny.items() if op == "apply_rotary")


def test_the_budget_ends_a_run(run_dry):
    ops = ("linear_cross_entropy", "jsd")
    rows, code = run_dry(BROKEN, "--only", "timing", "--budget", "5", "--op", *ops)
    assert code == 1
    assert [row.get("error") for row in rows] == [None, "Timeout", None]
    assert rows[-1] == {"step": "timing", "not reached": 4}


#: Breaks four ops: besides those of BROKEN, one leaves an error on the GPU that stays for the
#: process, in which all ops then fail.
STICKY = (
    BROKEN
    + """
lost = []
def loses(*args, **kwargs):
    lost.append(True)
    raise RuntimeError("CUDA error: unspecified launch failure")
def fails_when_lost(*args, works=functional.layer_norm, **kwargs):
    if lost:
        raise RuntimeError("CUDA error: unspecified launch failure")
    return works(*args, **kwargs)
functional.rms_norm = loses
functional.layer_norm = fails_when_lost
"""
)


def test_a_lease_costs_a_broken_op_its_own_cases_only(run_dry):
    """All steps in order of worth; what fails, crashes, hangs or loses the GPU ends alone."""
    ops = ("rms_norm", "layer_norm", "top_k", "linear_cross_entropy", "attention")
    lease = ("--lease", "150", "--timeout", "4", "--property", "forward", "--op", *ops)
    rows, code = run_dry(STICKY, *lease, OMNIATTN_COMMIT="0123abc")
    assert code == 1
    assert rows[0]["commit"] == "0123abc"
    steps = list(dict.fromkeys(row["step"] for row in rows))
    assert steps == ["machine", "wrappers", "timing", "profile", "specs", "choices"]
    timed = {}
    for row in rows:
        if row["step"] == "timing" and "op" in row:
            timed.setdefault((row["op"], row["pass"]), set()).add(row.get("error"))
    both = ("rms_norm", "layer_norm", "attention")
    assert timed.keys() == {
        *((op, each) for op in both for each in ("forward", "backward")),
        *(("top_k", "forward"), ("linear_cross_entropy", "forward+backward")),
    }
    for op, error in (("rms_norm", "RuntimeError"), ("linear_cross_entropy", "Timeout")):
        assert all(found == {error} for (name, _), found in timed.items() if name == op)
    for op in ("layer_norm", "attention"):
        assert timed[op, "forward"] == timed[op, "backward"] == {None}
    tiny = {(row["op"], row["dtype"]): row for row in rows if row["step"] == "wrappers"}
    assert tiny["top_k", "bf16"]["error"] == "Crash" and "error" not in tiny["top_k", "f16"]
    paths = _library.paths("cpu")
    taken = {(row["pass"], row["from"]) for row in rows if row["step"] == "choices"}
    assert taken == {("forward", path) for path in paths["attention"]} | {
        ("backward", path) for path in paths["attention_backward"]
    }


def test_recurrences_are_timed_by_the_paths_of_their_op():
    tables = ["recurrence", "recurrence_backward", "moe_experts"]
    calls = [(op, each) for op in ("kimi_delta_attention", "comba", "moe_experts")
             for each in ("forward", "backward")]  # fmt: skip
    found = gpu_module(f"print([steps.table_of(*call, {tables}) for call in {calls}])")
    assert ast.literal_eval(found) == [*tables[:2], *tables[:2], "moe_experts", "moe_experts"]


def test_a_lease_has_the_time_that_it_names():
    stages = gpu_module(
        """
from gpu_steps import lease
options = steps.Options(ops=("attention", "top_k"))
print([(step, o.ops, o.seconds, end) for step, o, end in lease.plan(options, 100.0, 390.0)])
"""
    )
    names, ops, _, ends = zip(*ast.literal_eval(stages), strict=True)
    assert names == ("wrappers", "timing", "profile", "specs", "sanitizers", "choices")
    assert ops == (("attention", "top_k"),) * 2 + (("attention",),) + (("attention", "top_k"),) * 3
    assert ends == (130.0, 230.0, 290.0, 340.0, 370.0, 490.0)


def test_all_ops_with_kernels_are_timed():
    """In the order of their worth, with every pass."""
    found = gpu_module(
        """
options = steps.Options(ops=tuple(n for n, s in steps.registry().items() if s.cuda != "planned"))
print([item.labels["op"] for item, _ in steps.timed(options)])
"""
    )
    ops = ast.literal_eval(found)
    assert set(ops) == {spec.name for spec in SPECS}
    assert ops[0] == "attention"


def gpu_module(script):
    """Output of a script that imports the steps of benchmarks/gpu.py."""
    command = [sys.executable, "-c", BENCHMARK + "from gpu_steps import steps\n" + script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_processes_start_anew_where_a_fork_cannot_use_cuda(run_dry):
    rows, code = run_dry(POISONED, "--only", "wrappers", "--op", "top_k", "--workers", "1")
    assert code == 0 and rows[0]["start"] == "spawn"
    assert {row["dtype"] for row in rows[1:]} == {"f64", "f32", "bf16", "f16"}


@pytest.mark.skipif("cuda" in _library.loaded, reason="there is a GPU")
@pytest.mark.skipif(_library.find("libgpu_fixtures.so") is None, reason="no nvcc")
def test_fixtures_report_that_there_is_no_gpu():
    assert b"CUDA" in fixtures().run_matmul(b"bf16", None, None, None)
