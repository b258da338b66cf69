"""PEP 517 backend: scikit-build-core, and torch as a build requirement where none is installed.

pip builds in an isolated environment that hides the installed torch from `sys.path`, and a plain
`torch` requirement would download a second, larger one. The installed one is all that the build
needs (headers and libtorch_cpu.so), so it is looked up on disk and handed to CMake as
OMNIATTN_TORCH_DIR.

pip shows nothing of a build that succeeds. It takes minutes, so its progress goes to the terminal.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import sysconfig
import threading
import time
from pathlib import Path

import scikit_build_core.build as _core
from scikit_build_core.build import *  # noqa: F403  (the hooks that are not overridden here)

_BUILD_TORCH = (
    "torch==2.13.0"  # pinned: what the wheel is built against where there is no torch yet
)
_STABLE_ABI_HEADER = "include/torch/csrc/stable/library.h"


def _torch_dir():
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(key)) / "torch" for key in ("purelib", "platlib")]
    found = [path for path in candidates if (path / "version.py").exists()]
    if found and not (found[0] / _STABLE_ABI_HEADER).exists():
        raise SystemExit(
            f"omniattn: needs torch >= 2.11 with its headers, got torch at {found[0]} without "
            f"{_STABLE_ABI_HEADER}; upgrade it (pip install 'torch>=2.11') or uninstall it"
        )
    return found[0] if found else None


def _require_compiler():
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler.split()[0]) for compiler in compilers):
        raise SystemExit(
            f"omniattn: needs a C++20 compiler (gcc >= 11 or clang >= 14), found none of "
            f"{compilers}; install one (for example: apt-get install g++) or name it with CXX=..."
        )


def _compiled(build, start):
    """Returns how many objects of a build folder are newer than `start`, and how many it has."""
    rules = (build / "build.ninja").read_text()
    objects = [build / name for name in re.findall(r"^build (\S+\.o):", rules, re.MULTILINE)]
    ages = [path.stat().st_mtime for path in objects if path.exists()]
    return sum(age >= start for age in ages), len(objects)


def _opened(terminal):
    try:
        return open(terminal, "w", buffering=1)
    except OSError:  # there is none
        return contextlib.nullcontext()


@contextlib.contextmanager
def _progress(build, terminal="/dev/tty", seconds=10.0):
    """Prints lines on the terminal, if there is one, while the folder `build` is built."""
    start, done = time.time(), threading.Event()

    def report(out):
        while not done.wait(seconds):
            with contextlib.suppress(OSError):  # before CMake has run, and while it writes
                compiled, total = _compiled(build, start)
                elapsed = time.time() - start
                print(f"omniattn: {compiled} of {total} files compiled, {elapsed:.0f} s", file=out)

    with _opened(terminal) as out:
        if out is None:
            yield
            return
        thread = threading.Thread(target=report, args=(out,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _with_torch(hook, state, *args, **kwargs):
    _require_compiler()
    torch_dir = _torch_dir()
    if torch_dir is not None:
        os.environ["OMNIATTN_TORCH_DIR"] = str(torch_dir)
    with _progress(Path("build", state)):
        return hook(*args, **kwargs)


def get_requires_for_build_wheel(config_settings=None):
    needed = _core.get_requires_for_build_wheel(config_settings)
    return needed if _torch_dir() else [*needed, _BUILD_TORCH]


def get_requires_for_build_editable(config_settings=None):
    needed = _core.get_requires_for_build_editable(config_settings)
    needed = [*needed, "pybind11>=3.0"]  # the development module _kernels
    return needed if _torch_dir() else [*needed, _BUILD_TORCH]


def build_wheel(*args, **kwargs):
    return _with_torch(_core.build_wheel, "wheel", *args, **kwargs)


def build_editable(*args, **kwargs):
    return _with_torch(_core.build_editable, "editable", *args, **kwargs)
