"""The tables of docs/ops.md and docs/variants.md.

python -m omniattn.testing.table [--check] [docs]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from omniattn.testing.autocast import MEANING, rule_of
from omniattn.testing.registry import registry, variants
from omniattn.testing.spec import SHORT_DTYPE, OpSpec, Variant

__all__ = ["replace_block", "support_table", "variant_table"]

_HEAD = """\
| op | dtypes | autocast | forward | backward | second order | CPU | CUDA | paper |
|---|---|---|---|---|---|---|---|---|"""


def support_table() -> str:
    """One row per OpSpec."""
    rows = [_row(spec) for spec in registry().values()]
    return "\n".join([_HEAD, *rows])


def rule_table() -> str:
    """One row per rule of autocast."""
    rows = [f"| {rule} | {meaning} |" for rule, meaning in MEANING.items()]
    return "\n".join(["| autocast | floating-point arguments |", "|---|---|", *rows])


def variant_table() -> str:
    """One row per published form."""
    rows = [_variant_row(variant) for variant in variants()]
    return "\n".join(
        ["| form | functions, modules, masks, terms, scalings | paper |", "|---|---|---|", *rows]
    )


def _variant_row(variant: Variant) -> str:
    names = ", ".join(f"`{name}`" for name in variant.names)
    return f"| {variant.form} | {names} | {variant.paper} |"


def _row(spec: OpSpec) -> str:
    cells = (
        f"`{spec.name}`",
        ", ".join(SHORT_DTYPE[d] for d in spec.dtypes),
        rule_of(spec.name) if torch.bfloat16 in spec.dtypes else "-",
        "yes",
        "yes" if spec.differentiable else "-",
        ("yes" if spec.second_order else "raises") if spec.differentiable else "-",
        "yes",
        spec.cuda,
        spec.paper,
    )
    return f"| {' | '.join(cells)} |"


def replace_block(text: str, name: str, block: str) -> str:
    """`text` with new lines between `<!-- <name>: begin -->` and `<!-- <name>: end -->`."""
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
        ("ops.md", "support table", support_table()),
        ("ops.md", "autocast", rule_table()),
        ("variants.md", "variant table", variant_table()),
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
