"""Fixtures that several folders use, and the share of threads of each process of a run."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from omniattn.ops.dispatch import library as _library
from omniattn.testing import threads

ROOT = Path(__file__).parents[1]

# Under `pytest -n`, workers that each took all cores would wait for one another.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    share = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(share)
    os.environ["OMP_NUM_THREADS"] = str(share)  # of what the tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests live until the end: the garbage collector need not look at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Number of workers of `pytest -n auto`; more would not fit into the memory of most
    machines."""
    return min(8, os.cpu_count() or 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models only lose by a second thread, on a busy machine a factor of ten."""
    with threads(1):
        yield


@pytest.fixture
def run_with_library() -> Callable[..., None]:
    """Runs files of tests/ops, those tests that `selection` (-k) names, with another CPU library of
    the development build, in a process of their own."""

    def require(library: str) -> None:
        """Skips the test if the build may lack this library and does (.ci/run has them all)."""
        if _library.find(library) is None:
            message = f"{library} is not there; OMNIATTN_BUILD_ALL=ON builds it"
            required = os.environ.get("OMNIATTN_REQUIRE_EMULATION") == "1"
            assert re.search("_amx_|_sanitized", library) and not required, message
            pytest.skip(message)

    def run(library: str, selection: str, *files: str, options: tuple = (), **env: str) -> None:
        require(library)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", selection]
        command += ["-o", "empty_parameter_set_mark=fail_at_collect"]  # of OMNIATTN_TEST_SPECS
        paths = [next((ROOT / "tests/ops").rglob(f"{f}.py")) for f in files]
        command += [*options, *map(str, paths)]
        env = os.environ | {"OMNIATTN_CPU_LIBRARY": library} | env
        result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]

    return run
