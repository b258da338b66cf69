"""Imports of other libraries find the functions of compat; lists of their names."""

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import compat_names
import pytest

from omniattn import compat
from omniattn.compat._names import MODULES, library

NOT_INSTALLED = sorted(p for p in MODULES if importlib.util.find_spec(p) is None)


@pytest.fixture
def installed():
    try:
        yield compat.install()
    finally:
        compat.uninstall()


@pytest.mark.parametrize("package", MODULES)
def test_names_that_are_there_are_those_of_our_module(package):
    ours = importlib.import_module(MODULES[package])
    listed = {w for names in library(package).modules.values() for w in names.there.values()}
    assert listed <= set(ours.__all__) and all(hasattr(ours, name) for name in listed)
    unlisted = set(ours.__all__) - listed
    assert not unlisted, f"names that {package} does not have: {unlisted}"


@pytest.mark.parametrize("package", MODULES)
def test_a_name_has_one_status(package):
    for module, names in library(package).modules.items():
        kinds = [*names.there, *names.refused, *names.absent]
        assert kinds and len(kinds) == len(set(kinds)), module
        assert all(names.refused.values())


def test_page_is_that_of_the_lists():
    page = Path(__file__).parents[2] / "docs/compat.md"
    hint = "run python tools/compat_names.py page"
    assert page.read_text(encoding="utf-8") == compat_names.page(), hint


@pytest.mark.parametrize("package", sorted(set(MODULES) - set(NOT_INSTALLED)))
def test_names_of_an_installed_version_are_listed(package):
    listed = library(package).modules
    spec = importlib.util.find_spec(package)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    names = {a.name for n in imports if (n.module or "").startswith(package) for a in n.names}
    known = listed[package]
    assert names <= {*known.there, *known.refused, *known.absent}


@pytest.mark.skipif("fla" not in NOT_INSTALLED, reason="fla is installed")
def test_scripts_import_from_where_the_libraries_have_names(installed):
    assert installed["fla"] and set(installed) == set(MODULES)
    from fla.ops import chunk_gla
    from fla.ops.gla import chunk_gla as same
    from fla.ops.gla.chunk import chunk_gla as again

    assert chunk_gla is same is again is compat.fla.chunk_gla
    import fla

    assert fla.ops.gla.chunk_gla is chunk_gla and "chunk_gla" in dir(fla.ops.gla)
    assert fla.__version__ == f"{library('fla').version}+omniattn"
    assert fla.__spec__.origin == "omniattn.compat"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


@pytest.mark.skipif(len(NOT_INSTALLED) < len(MODULES), reason="a library is installed")
def test_scripts_import_from_each_library(installed):
    from causal_conv1d import causal_conv1d_fn
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn.ops.triton.layer_norm import RMSNorm
    from liger_kernel.transformers import LigerCrossEntropyLoss
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    ours = compat.flash_attn
    assert (flash_attn_func, unpad_input) == (ours.flash_attn_func, ours.unpad_input)
    assert flash_attn_varlen_func is ours.flash_attn_varlen_func
    assert RMSNorm is ours.TritonRMSNorm
    assert causal_conv1d_fn is compat.causal_conv1d.causal_conv1d_fn
    assert LigerCrossEntropyLoss is compat.liger.LigerCrossEntropyLoss
    assert selective_scan_fn is compat.mamba_ssm.selective_scan_fn


@pytest.mark.skipif(len(NOT_INSTALLED) < len(MODULES), reason="a library is installed")
def test_errors_have_the_reason(installed, monkeypatch):
    monkeypatch.setattr(library("xformers").modules["xformers.ops.unbind"], "absent", ["later"])
    with pytest.raises(ImportError, match=r"GPTModel is not in omniattn.compat: models are in"):
        from flash_attn.models.gpt import GPTModel  # noqa: F401
    with pytest.raises(ImportError, match=r"unbind.later has no counterpart in omniattn.compat"):
        from xformers.ops.unbind import later  # noqa: F401
    with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'fla.ops'"):
        from fla.ops import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"fla\.nothing"):
        importlib.import_module("fla.nothing")
    import flash_attn

    assert getattr(flash_attn, "nothing", None) is None
    with pytest.raises(ValueError, match=r"packages must be some of .*flash_attn.*did you mean"):
        compat.install("flash_atn")


def test_an_installed_library_is_never_replaced(monkeypatch):
    theirs = types.ModuleType("fla")
    monkeypatch.setitem(sys.modules, "fla", theirs)
    assert compat.install("fla") == {"fla": False}
    assert importlib.import_module("fla") is theirs
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fla.ops")
    compat.uninstall()
    assert sys.modules["fla"] is theirs


def test_a_library_on_the_path_is_never_replaced(monkeypatch, tmp_path):
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm/__init__.py").write_text("theirs = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found = compat.install("mamba_ssm", "fla")
    try:
        assert found == {"mamba_ssm": False, "fla": "fla" in NOT_INSTALLED}
        assert importlib.import_module("mamba_ssm").theirs
    finally:
        compat.uninstall()
        sys.modules.pop("mamba_ssm", None)


@pytest.mark.skipif(not NOT_INSTALLED, reason="all libraries are installed")
def test_uninstall_undoes():
    package = NOT_INSTALLED[0]
    compat.install()
    importlib.import_module(package)
    compat.uninstall()
    assert package not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package)
