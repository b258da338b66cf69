"""A missing piece of the build is named, with what to do about it."""

import importlib.util
import os
import subprocess
import sysconfig
import time
from pathlib import Path

import backend
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def old_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.4.0'\n")
    return tmp_path


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"needs a C\+\+20 compiler"):
        backend.build_wheel(str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no-such-compiler"):
        backend.build_wheel(str(tmp_path))


def test_old_torch(monkeypatch, old_torch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda key: str(old_torch))
    with pytest.raises(SystemExit, match=r"needs torch >= 2.11 with its headers"):
        backend.get_requires_for_build_wheel()


def test_no_torch_is_a_build_requirement(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda key: str(tmp_path))
    assert any(r.startswith("torch==") for r in backend.get_requires_for_build_wheel())


def test_installed_torch_is_used():
    assert not any(r.startswith("torch") for r in backend.get_requires_for_build_wheel())


def test_cmake_names_the_old_torch(old_torch, tmp_path):
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "b", f"-DOMNIATTN_TORCH_DIR={old_torch}/torch"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "torch >= 2.11 is needed" in result.stderr


def test_a_build_reports_its_progress_on_the_terminal(tmp_path):
    (tmp_path / "build.ninja").write_text("build a.o: CXX a.cpp\nbuild b.o: CXX b.cpp\n")
    terminal = tmp_path / "terminal"
    with backend._progress(tmp_path, terminal, seconds=0.05):
        (tmp_path / "a.o").touch()
        os.utime(tmp_path / "a.o", (time.time() + 1,) * 2)  # the clock of files is coarser
        time.sleep(0.5)
    assert "omniattn: 1 of 2 files compiled, " in terminal.read_text()
    with backend._progress(tmp_path, tmp_path / "none/terminal"):
        pass
