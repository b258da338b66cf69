"""omniattn hub: writes the package as a kernel repository for Hugging Face's `kernels`."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import omniattn
from omniattn.cli.errors import CommandError, writing
from omniattn.ops.dispatch import library as _library

_INIT = '''"""omniattn {version}: token mixers and channel mixers as native ops of torch."""

import importlib.util
import sys
from pathlib import Path


def _load():
    folder = Path(__file__).parent / "omniattn"
    spec = importlib.util.spec_from_file_location(
        "omniattn", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["omniattn"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["omniattn"]
        raise


if "omniattn" not in sys.modules:  # its ops can be registered once in a process
    _load()

import omniattn

if omniattn.__version__ != "{version}":
    raise ImportError(
        "a process can hold one version of omniattn, {version} or "
        f"{{omniattn.__version__}} from {{omniattn.__file__}}, which is imported already"
    )

from omniattn import functional, reference

__all__ = ["functional", "reference"]

if importlib.util.find_spec("transformers") is not None:
    from . import layers

    __all__ += ["layers"]
'''

_LAYERS = '''"""Layers under the names that transformers gives to its own."""

from omniattn.hf.patching.hub_layers import kernel_mapping

globals().update({name: devices["cpu"].load() for name, devices in kernel_mapping().items()})

__all__ = sorted(kernel_mapping())
'''


def run(args: argparse.Namespace) -> int:
    """Writes the variants, prints their paths and returns the exit code."""
    with writing(args.folder):
        if args.folder.exists():
            raise CommandError(f"{args.folder} must not exist")
    backends: dict[str, dict[str, Any]] = {"cpu": {"type": "cpu"}}
    if args.cuda is not None:
        tag = "cu" + "".join(args.cuda.split(".")[:2])
        backends[tag] = {"type": "cuda", "archs": args.archs}
    stable = "".join(map(str, _library.MINIMUM_TORCH))
    for tag, backend in backends.items():
        name = f"torch-stable-abi{stable}-{tag}-{platform.machine()}-linux"
        with writing(args.folder):
            variant = write_variant(args.folder / "build" / name, backend)
        print(variant)
    return 0


def write_variant(folder: Path, backend: dict[str, Any]) -> Path:
    """Writes a build variant: the package, its libraries, the layers and the metadata."""
    names = ["libomniattn_cpu.so"] + [_library.CUDA_LIBRARY] * (backend["type"] == "cuda")
    libraries = [(name, _library.find(name)) for name in names]
    missing = [name for name, path in libraries if path is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not found in the package")
    package = Path(omniattn.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(package, folder / "omniattn", ignore=ignored)
    for name, path in libraries:
        shutil.copy2(str(path), folder / "omniattn" / name)
    (folder / "__init__.py").write_text(_INIT.format(version=omniattn.__version__))
    (folder / "layers.py").write_text(_LAYERS)
    files = {
        str(path.relative_to(folder)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()[:12]
    metadata = {
        "id": f"_omniattn_{backend['type']}_{digest}",
        "name": "omniattn",
        "version": 0,
        "license": "bsd-3-clause",
        "python-depends": [],
        "backend": backend,
        "digest": {
            "algorithm": "sha256",
            "files": {name: value.decode() for name, value in files.items()},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder
