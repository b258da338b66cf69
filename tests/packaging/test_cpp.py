"""Programs without Python: what the library registers by itself, and a package run from C++."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniattn import config
from omniattn.ops.dispatch import library as _library

PAGE = Path(__file__).parents[2] / "docs/export.md"
TORCH = Path(torch.__file__).parent

#: Prints the ops on tensors that have no CPU kernel, in a process that loads the library alone.
MISSING = """
import sys, torch
torch.ops.load_library(sys.argv[1])
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("omniattn::")]
assert len(names) > 100 and "omniattn" not in sys.modules
for name in names:
    op = getattr(torch.ops.omniattn, name.removeprefix("omniattn::")).default
    on_tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
    if on_tensors and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        print(name)
"""


def run(*command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_op_has_a_cpu_kernel_without_python():
    assert run(sys.executable, "-c", MISSING, _library.loaded["cpu"]) == ""


#: Single steps in place, for layers on the CPU, and ops that Python computes on CUDA.
CPU_ONLY = [
    "omniattn::atlas_linear",
    "omniattn::atlas_linear_backward",
    "omniattn::atlas_linear_raw",
    "omniattn::attention_tangents",
    "omniattn::causal_conv1d_",
    "omniattn::decayed_sum",
    "omniattn::dynamic_conv1d",
    "omniattn::dynamic_conv1d_backward",
    "omniattn::dynamic_conv1d_raw",
    "omniattn::fast_weights",
    "omniattn::fast_weights_backward",
    "omniattn::fast_weights_raw",
    "omniattn::log_linear_attention",
    "omniattn::log_linear_attention_backward",
    "omniattn::log_linear_attention_raw",
    "omniattn::mamba3_inputs",
    "omniattn::mamba3_inputs_backward",
    "omniattn::mamba3_inputs_raw",
    "omniattn::mesa_step",
    "omniattn::multi_token_attention",
    "omniattn::multi_token_attention_backward",
    "omniattn::multi_token_attention_raw",
    "omniattn::parallax_attention",
    "omniattn::parallax_attention_backward",
    "omniattn::parallax_attention_raw",
    "omniattn::selective_scan_tangents",
    "omniattn::ssd_",
]


def test_every_op_has_a_cuda_kernel_without_python():
    """The emulated library has the ops of the CUDA library, for tensors on the CPU."""
    library = _library.find("libomniattn_emulated_value.so")
    if library is None:
        pytest.skip("this build has no emulator")
    assert sorted(run(sys.executable, "-c", MISSING, library).split()) == CPU_ONLY


def test_python_has_no_kernel_for_cuda():
    """An op without a native kernel only says so."""
    if "cuda" in _library.loaded:
        assert sorted(f"omniattn::{name}" for name in _library._stand_ins["cuda"]) == CPU_ONLY
    else:
        assert _library.ops_of("cuda") == []


def blocks(*languages):
    """The blocks of code of the page's part on C++, which has one of each language."""
    part = PAGE.read_text().partition("## In C++")[2]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    assert len(found) == len(languages)
    return [dict(found)[language] for language in languages]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_package_runs_in_cpp(tmp_path):
    """The program of docs/export.md, compiled as the page says, computes what the module does."""
    python, cpp, shell = blocks("python", "cpp", "")
    value = "x = torch.ones(2, 33, 64).cumsum(1) / 33\nprint(layer(x).square().mean().item())"
    expected = float(run(sys.executable, "-c", python + value, cwd=tmp_path))
    (tmp_path / "main.cpp").write_text(cpp)
    assert config.CPU_LIBRARY in shell
    found = run(
        *("bash", "-ec", shell.replace(config.CPU_LIBRARY, str(_library.loaded["cpu"]))),
        cwd=tmp_path,
        env={**os.environ, "T": str(TORCH)},
    )
    assert math.isclose(float(found), expected, rel_tol=1e-5)
