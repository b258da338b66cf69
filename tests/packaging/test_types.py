"""The stub that type checkers read is made from the layers; mypy itself reads typed_layers.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_stub_of_signatures_is_current():
    pytest.importorskip("ruff", reason="its formatter writes the stub")
    subprocess.run([sys.executable, str(ROOT / "tools/signatures.py"), "--check"], check=True)
