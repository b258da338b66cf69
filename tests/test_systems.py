"""Every system has its functions, layers, models, tests, rows of benchmarks and pages."""

import functools
import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import goals
import pytest
import torch
from system_rows.rows import SYSTEMS

from omniattn import functional, models, modules
from omniattn.compat import liger
from omniattn.functional import masks, scores
from omniattn.models import PRESETS
from omniattn.models.presets import TRAINED
from omniattn.testing import registry
from omniattn.testing.systems import SECTIONS, read_systems, system_table

ROOT = Path(__file__).parents[1]
ROWS = read_systems(ROOT / "docs/systems.csv")
#: First letter of an id -> number of the specification's ids, which count from 1.
COUNTS = {"A": 36, "S": 23, "L": 18, "M": 12, "P": 14, "F": 21, "N": 32, "C": 25, "R": 30}
#: Columns that rows still lack. Entries may only be removed.
AWAITED: dict[str, tuple[str, ...]] = {}

BENCHMARKS = {
    *(f"{name}:{bench.case.label}" for name, op in registry().items() for bench in op.benchmarks),
    *(row.case for rows in SYSTEMS.values() for row in rows),
    *(f"goals:{group}" for group in goals.GROUPS),
}


def wrong(column, right):
    """The names of a column that are not right, with the ids of their rows."""
    pairs = ((row, name) for row in ROWS for name in getattr(row, column))
    return [(row.id, name) for row, name in pairs if not right(row, name)]


def test_every_system_is_there_once():
    assert [row.id for row in ROWS] == [
        f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)
    ]
    assert list(SECTIONS) == list(COUNTS)
    assert [name for name, count in Counter(r.system for r in ROWS).items() if count > 1] == []


def test_the_ids_are_those_of_the_specification():
    """Where the specification is beside the repository."""
    found = [folder / "shared/spec/README.md" for folder in ROOT.parents]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        pytest.skip("no specification")
    text = path.read_text(encoding="utf-8").split("## Index of systems")[1]
    index, *added = text.partition("## Errata")[0], *re.split(r"^## Rows", text, flags=re.M)[1:]
    ids = re.findall(r"^\| ([A-Z]\d+) \|", index, re.MULTILINE)
    for part in added:
        body = part.partition("\n")[2]
        ids += re.findall(r"(?:^|\. |\n)([A-Z]\d+) ", body)
    assert sorted(ids) == sorted(row.id for row in ROWS)


def test_what_is_lacking_is_awaited():
    lacking = {row.id: row.lacking for row in ROWS if row.lacking}
    assert lacking == AWAITED
    assert sum(map(len, AWAITED.values())) == 0  # a number that may only fall


def test_functions_and_modules_are_public():
    functions = {*functional.__all__, *masks.__all__, *scores.__all__}
    assert wrong("functions", lambda row, name: name in functions) == []
    layers = {*modules.__all__, *liger.__all__}
    assert wrong("modules", lambda row, name: name in layers) == []


def test_models_and_tools_are_there():
    def is_there(row, name):
        package, _, last = name.rpartition(".")
        if name in PRESETS or not package:
            return name in PRESETS or name in models.__all__
        module = importlib.import_module(f"omniattn.{package}")
        return hasattr(module, last) or importlib.util.find_spec(f"omniattn.{name}") is not None

    assert wrong("models", is_there) == []


@functools.cache
def layers_of(preset):
    """Names of the classes of all layers of a preset."""
    with torch.device("meta"):
        return {type(module).__name__ for module in TRAINED[preset].build().modules()}


def test_small_models_have_a_layer_of_their_row():
    def has(row, name):
        return name not in TRAINED or not row.modules or set(row.modules) & layers_of(name)

    assert wrong("models", has) == []


@functools.cache
def text_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_tests_are_there():
    def is_there(row, name):
        path, _, function = name.partition("::")
        return re.search(rf"^def {function}\(", text_of(f"tests/{path}"), re.MULTILINE)

    assert wrong("tests", is_there) == []


def test_rows_of_benchmarks_are_there():
    assert wrong("benchmarks", lambda row, name: name in BENCHMARKS) == []


def anchor_of(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section_of(text, anchor):
    """The text from a heading to the next one of its level."""
    blank = re.sub(  # of the same length, without comments that look like headings
        r"^```.*?^```$", lambda code: " " * len(code[0]), text, flags=re.MULTILINE | re.DOTALL
    )
    heads = list(re.finditer(r"^(#+) (.+)$", blank, re.MULTILINE))
    for n, head in enumerate(heads):
        if anchor_of(head[2]) == anchor:
            ends = [later.start() for later in heads[n + 1 :] if len(later[1]) <= len(head[1])]
            return text[head.start() : min(ends, default=len(text))]
    return ""


def test_pages_name_the_system_or_what_computes_it():
    def names_it(row, name):
        path, _, anchor = name.partition("#")
        text = text_of(f"docs/{path}")
        names = {*row.functions, *row.modules, *(model.split(".")[-1] for model in row.models)}
        names |= {word for word in re.findall(r"\w[\w-]+", row.system) if len(word) > 3}
        found = "|".join(map(re.escape, names))
        return re.search(found, section_of(text, anchor) if anchor else text, re.IGNORECASE)

    assert wrong("pages", names_it) == []


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", system_table(ROOT / "docs/systems.csv"))
    assert len(links) > 300
    assert [link for link in set(links) if not (ROOT / "docs" / link).is_file()] == []
