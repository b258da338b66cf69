"""The table of layers in docs/architecture.md says who may include or import whom."""

import ast
import graphlib
import re
from pathlib import Path

import counts
import pytest

from omniattn.modules import Cache

ROOT = Path(__file__).parents[2]


def layers() -> dict[str, set[str]]:
    """Folder of a layer -> folders that it may use."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    allowed: dict[str, set[str]] = {}
    for path, uses in re.findall(
        r"^\| [^|]+ \| `([\w/]+/)[^|]* \| ([^|]+) \|$", text, re.MULTILINE
    ):
        tree, name = re.match(r"(csrc|python/omniattn)/(\w+)/", path).groups()
        above = {folder for folder in allowed if folder.startswith(tree)}
        known = {f"{tree}/{word}" for word in re.findall(r"\w+", uses)} & above
        used = above if "all of the above" in uses else known
        allowed[f"{tree}/{name}"] = allowed.get(f"{tree}/{name}", set()) | used
    return allowed


LAYERS = layers()


def used_by(source: str, suffix: str) -> set[str]:
    """The folders that a file includes or imports, functions and type checking included."""
    if suffix != ".py":
        return {f"csrc/{name}" for name in re.findall(r'#include "(\w+)/', source)}
    names = counts.imported(ast.parse(source))
    return {f"python/omniattn/{n.split('.')[1]}" for n in names if n.startswith("omniattn.")}


def violations(layer: str, source: str, suffix: str) -> set[str]:
    return (used_by(source, suffix) & set(LAYERS)) - LAYERS[layer] - {layer}


def test_every_folder_is_in_the_table():
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("csrc/*/*.*", "python/omniattn/*/__init__.py")
        for path in ROOT.glob(pattern)
    }
    assert folders - {"csrc/kernels"} == set(LAYERS) - {"csrc/kernels"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_uses_only_what_the_table_allows(layer):
    files = [p for p in (ROOT / layer).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu")]
    assert files
    for path in files:
        found = violations(layer, path.read_text(encoding="utf-8"), path.suffix)
        assert not found, f"{path.relative_to(ROOT)} must not use {found}"


@pytest.mark.parametrize("package", ["reference", "functional", "modules", "models", "hf"])
def test_rooms_import_each_other_in_one_order(package):
    arrows = counts.room_imports(package)
    assert 0 < len(arrows) <= 30
    graph: dict[str, set[str]] = {}
    for room, other in arrows:
        graph.setdefault(room, set()).add(other)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises where there is a circle


def concrete_caches(cls: type = Cache) -> set[str]:
    """The names of the classes that implement the protocol."""
    below = [name for sub in cls.__subclasses__() for name in concrete_caches(sub)]
    return {sub.__name__ for sub in cls.__subclasses__()} | set(below)


CACHES = concrete_caches()


def named(source: str) -> set[str]:
    """All names that a file imports or reads."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return imported | read


def test_only_the_room_of_caches_names_a_kind_of_cache():
    """Layers and models ask the protocol, `Cache`."""
    modules = ROOT / "python/omniattn/modules"
    assert {"KVCache", "PagedCache", "EvictingCache"} <= CACHES
    assert named((modules / "caches/new.py").read_text()) & CACHES
    for path in [*modules.rglob("*.py"), *(ROOT / "python/omniattn/models").rglob("*.py")]:
        if path.parent.name != "caches" and path != modules / "__init__.py":  # which exports them
            found = named(path.read_text()) & CACHES
            assert not found, f"{path.relative_to(ROOT)} must not name {found}"


@pytest.mark.parametrize(
    ("tree", "most"),
    [
        ("python/omniattn/compositions", 20),
        ("python/omniattn/functional", 20),
        ("python/omniattn/hf", 20),
        ("python/omniattn/models", 20),
        ("python/omniattn/ops", 20),
        ("python/omniattn/modules", 20),
        ("python/omniattn/reference", 20),
        ("python/omniattn/testing", 20),
        ("benchmarks", 20),
        ("tests", 20),
        ("csrc/kernels", 40),
        ("csrc/ops", 20),
    ],
)
def test_no_folder_is_crowded(tree, most):
    sizes = {d: n for d, n in counts.folder_sizes().items() if f"{d}/".startswith(f"{tree}/")}
    assert sizes
    assert {folder: n for folder, n in sizes.items() if n > most} == {}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("python/omniattn/modules", "from omniattn.ops.moe import ACTIVATIONS"),
        ("python/omniattn/modules", "def f():\n    from omniattn import functional, reference"),
        ("python/omniattn/functional", "import omniattn.modules"),
        ("python/omniattn/reference", "if T:\n    from omniattn.functional.masks import Mask"),
        ("csrc/semantics", '#include "runtime/vec.h"'),
        ("csrc/kernels", '#include "ops/tensor.h"'),
    ],
)
def test_a_violation_is_found(layer, source):
    assert violations(layer, source, ".py" if layer.startswith("python") else ".h")
