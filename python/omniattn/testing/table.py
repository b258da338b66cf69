"""Writes the tables of docs/ops.md, variants.md and systems.md, or checks that they are up to date.

python -m omniattn.testing.table [--check] [docs]
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import omniattn
from omniattn import functional
from omniattn.testing.autocast import MEANING, rule_of
from omniattn.testing.registry import registry, variants
from omniattn.testing.spec import FLOATS, SHORT_DTYPE, OpSpec, Variant
from omniattn.testing.systems import system_table

__all__ = ["COMMON_CUDA", "exception_table", "op_table", "replace_block", "variant_table"]

#: State of most CUDA kernels, stated once in docs/ops.md; other states are exceptions.
COMMON_CUDA = "emulated"
_PACKAGE = Path(omniattn.__file__).parent
_LINKS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}


def op_table() -> str:
    """Returns the ops by family and autocast rule, with links to docstrings and papers."""
    cells: dict[tuple[str, str], list[str]] = {}
    for spec in registry().values():
        cells.setdefault((spec.family, _autocast(spec)), []).append(_op(spec))
    rows = [f"| {family} | {rule} | {', '.join(ops)} |" for (family, rule), ops in cells.items()]
    return "\n".join(["| family | autocast | ops |", "|---|---|---|", *rows])


def _op(spec: OpSpec) -> str:
    function = inspect.unwrap(getattr(functional, spec.name))
    path = Path(inspect.getfile(function)).relative_to(_PACKAGE)
    return f"[`{spec.name}`](../python/omniattn/{path.as_posix()}) ({_paper(spec.paper)})"


def _paper(paper: str) -> str:
    """Returns a paper's authors and year as a link, or its full text without a link."""
    found = re.fullmatch(r"(.+), (arXiv|doi) (\S+)", paper)
    return f"[{found[1]}]({_LINKS[found[2]]}{found[3]})" if found else paper


def _autocast(spec: OpSpec) -> str:
    return rule_of(spec.name) if torch.bfloat16 in spec.dtypes else "-"


def exception_table() -> str:
    """Returns a row for each op that deviates from the properties stated once in docs/ops.md."""
    found = ((spec.name, "; ".join(_exceptions(spec))) for spec in registry().values())
    rows = [f"| `{name}` | {text} |" for name, text in found if text]
    return "\n".join(["| op | exception |", "|---|---|", *rows])


def _exceptions(spec: OpSpec) -> Iterator[str]:
    if spec.dtypes != FLOATS:
        yield f"dtypes: {', '.join(SHORT_DTYPE[dtype] for dtype in spec.dtypes)} only"
    if _autocast(spec) == "-":
        yield "not changed by autocast"
    if not spec.differentiable:
        yield "no derivatives"
    elif not spec.second_order:
        yield "second and forward-mode derivatives raise an error"
    if spec.cuda != COMMON_CUDA:
        yield f"CUDA: {spec.cuda}"


def rule_table() -> str:
    """Returns a row for each autocast rule."""
    rows = [f"| {rule} | {meaning} |" for rule, meaning in MEANING.items()]
    return "\n".join(["| autocast | floating-point arguments |", "|---|---|", *rows])


def variant_table() -> str:
    """Returns a row for each published form."""
    rows = [_variant_row(variant) for variant in variants()]
    return "\n".join(
        [
            "| form | functions, modules, masks, score terms, scalings | paper |",
            "|---|---|---|",
            *rows,
        ]
    )


def _variant_row(variant: Variant) -> str:
    names = ", ".join(f"`{name}`" for name in variant.names)
    return f"| {variant.form} | {names} | {variant.paper} |"


def replace_block(text: str, name: str, block: str) -> str:
    """Returns `text` with new lines between `<!-- <name>: begin -->` and `<!-- <name>: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        raise ValueError(f"replace_block: text must have the markers {begin} and {end}")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{block}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("docs", type=Path, nargs="?", default=Path("docs"), help="folder")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    args = parser.parse_args()
    for page, name, table in (
        ("ops.md", "ops", op_table()),
        ("ops.md", "exceptions", exception_table()),
        ("ops.md", "autocast", rule_table()),
        ("variants.md", "variant table", variant_table()),
        ("systems.md", "systems", system_table(args.docs / "systems.csv")),
    ):
        path = args.docs / page
        text = path.read_text()
        wanted = replace_block(text, name, table)
        if text == wanted:
            continue
        if args.check:
            sys.exit(f"{path} is out of date: run python -m omniattn.testing.table")
        path.write_text(wanted)


if __name__ == "__main__":
    main()
