"""The CUDA library is built without a CUDA torch; its kernels use what the committed table says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")


def test_resources_are_those_of_the_table():
    script = [sys.executable, str(ROOT / "benchmarks/cuda_resources.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
