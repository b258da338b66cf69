"""python -m omniattn hub: a repository that `kernels` loads, by its documented rules."""

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omniattn.cli import main
from omniattn.hf.patching.hub_layers import FORWARDS

#: Imports a variant as `kernels` does, in a process that cannot find omniattn.
IMPORT = """
import importlib.util, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
sys.modules[name] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
USE = """
import torch
assert "layers" in kernel.__all__
assert pathlib.Path(sys.modules["omniattn"].__file__).is_relative_to(folder)
y = kernel.functional.rms_norm(torch.ones(2, 8), torch.ones(8))
assert torch.allclose(y, torch.ones(2, 8), atol=1e-5)
print(*kernel.layers.__all__)
"""
#: Imports a variant through `kernels` itself, and runs one of its layers in a model.
KERNELIZE = """
import pathlib, sys
import kernels, torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
folder = pathlib.Path(sys.argv[1]).parents[1]
kernel = kernels.get_local_kernel(folder)
assert kernel.functional.__name__ == "omniattn.functional"
[loaded] = kernels.get_loaded_kernels()
assert (loaded.metadata.version, loaded.metadata.license) == (0, "bsd-3-clause")
norm, x = LlamaRMSNorm(8), torch.randn(2, 8)
expected = norm(x)
kernels.replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
layer = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
with kernels.use_kernel_mapping({"RMSNorm": {"cpu": layer}}):
    kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
assert norm.forward.__func__ is layer.load().forward
assert torch.allclose(norm(x), expected)
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "omniattn"
    assert main(["hub", str(folder)]) == 0
    (found,) = (folder / "build").iterdir()
    return found


def python(code: str, variant: Path) -> subprocess.CompletedProcess:
    paths = [path for path in sys.path if not (Path(path) / "omniattn/__init__.py").exists()]
    code = f"import sys\nsys.path[:] = {paths}\n{code}"
    command = [sys.executable, "-I", "-S", "-c", code, str(variant)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_variant_has_what_the_rules_ask_for(variant):
    assert variant.name.startswith("torch-stable-abi211-cpu-") and variant.name.endswith("-linux")
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].isidentifier() and metadata["name"] == "omniattn"
    assert (metadata["backend"], metadata["python-depends"]) == ({"type": "cpu"}, [])
    files = {path for path in variant.rglob("*") if path.is_file()} - {variant / "metadata.json"}
    digests = metadata["digest"]["files"]
    assert digests.keys() == {str(path.relative_to(variant)) for path in files}
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).digest()
        assert digests[str(path.relative_to(variant))] == base64.b64encode(digest).decode()
    assert not list(variant.rglob("__pycache__"))
    assert [path.name for path in variant.rglob("*.so")] == ["libomniattn_cpu.so"]


def test_a_process_without_the_package_gets_its_ops_and_layers(variant):
    done = python(IMPORT + USE, variant)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(FORWARDS)


def test_another_version_in_the_process_is_an_error(variant):
    other = "import types\nsys.modules['omniattn'] = other = types.ModuleType('omniattn')\n"
    other += "other.__version__, other.__file__ = '0.0.1', 'elsewhere'\n"
    done = python(other + IMPORT, variant)
    assert "can hold one version of omniattn" in done.stderr


def test_kernels_loads_it(variant):
    pytest.importorskip("kernels")
    done = python(KERNELIZE, variant)
    assert done.returncode == 0, done.stderr


def test_errors(variant, capsys):
    assert main(["hub", str(variant)]) == 1
    assert "must not exist" in capsys.readouterr().err
    occupied = variant / "metadata.json"
    for folder in ("/proc/omniattn", str(occupied / "omniattn")):
        assert main(["hub", folder]) == 1
        assert capsys.readouterr().err.startswith(f"hub: cannot write to {folder}: ")
