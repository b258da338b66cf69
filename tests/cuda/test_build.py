"""The CUDA library is built without a CUDA torch; its kernels use what the committed table says."""

import shutil
import subprocess
import sys
from pathlib import Path

import machine_code
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")


def test_resources_are_those_of_the_table():
    script = [sys.executable, str(ROOT / "benchmarks/cuda_resources.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def codes(request, tmp_path_factory):
    """Machine code of the kernels of machine_code.cu by their names."""
    compiled = tmp_path_factory.mktemp("code") / "kernels.o"
    source = Path(__file__).with_name("machine_code.cu")
    command = ["nvcc", "-std=c++20", "-O3", f"-arch={request.param}", f"-I{ROOT / 'csrc'}", "-c"]
    subprocess.run([*command, source, "-o", compiled], check=True)
    (code,) = machine_code.read(compiled).values()
    return {next(n for n in ("Lb1", "Lb0", "tile") if n in name): c for name, c in code.items()}


def test_split_stores_are_counted(codes):
    assert codes["Lb1"].split_stores() == 4
    assert codes["Lb0"].split_stores() == 0


def test_tile_is_the_shortest_way_through_all_products(codes):
    work = codes["tile"].tile()
    assert work.products % 8 == 0 and work.products > 0  # the compiler may unroll the loop
    assert work.products + 1 < work.instructions < 8 * work.products
    assert work.local == 0
    assert codes["tile"].local_in_loops() > 0
