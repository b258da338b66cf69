"""The installed files suffice for what a page shows: nothing is read from the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniattn.ops.dispatch import library as _library

ROOT = Path(__file__).parents[2]
PACKAGES = ("omniattn", "omniattn_cli", "omniattn_pytest")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages and the library, as a wheel unpacks them."""
    folder = tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package in PACKAGES:
        shutil.copytree(ROOT / "python" / package, folder / package, ignore=ignored)
    library = _library.find("libomniattn_cpu.so")
    assert library is not None
    shutil.copy2(library, folder / "omniattn")
    return folder


def test_a_wheel_has_these_packages():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"python/(\w+)"', re.search(r"wheel.packages = .*", text)[0]) == [*PACKAGES]


@pytest.mark.slow
def test_an_own_variant_needs_no_repository(site, tmp_path):
    text = (ROOT / "docs/own_variant.md").read_text(encoding="utf-8")
    page = tmp_path / "page.py"
    page.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)))
    # Without site-packages' own hooks, of which one finds the files of an editable install.
    paths = [str(site), str(Path(torch.__file__).parents[1])]
    program = (
        f"import runpy, sys; sys.path[:0] = {paths}; runpy.run_path({str(page)!r}); "
        f"import omniattn; assert omniattn.__file__.startswith({str(site)!r}), omniattn.__file__"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMNIATTN_", "PYTHON"))}
    command = [sys.executable, "-I", "-S", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
