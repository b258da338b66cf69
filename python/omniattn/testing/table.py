"""The README's tables of supported ops and variants.

python -m omniattn.testing.table [--check] [README.md]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omniattn.config import CPU_ISAS
from omniattn.testing.registry import registry
from omniattn.testing.spec import SHORT_DTYPE, OpSpec
from omniattn.testing.variants import VARIANTS, Variant

__all__ = ["replace_block", "support_table", "variant_table"]

_HEAD = """\
| op | dtypes | forward | backward | second order | CPU | CUDA | paper |
|---|---|---|---|---|---|---|---|"""

_NOTE = f"""\
CPU kernels: {", ".join(CPU_ISAS)}; the best of the machine is chosen at run time.
CUDA: *native* kernels have passed their tests on a GPU, whose record is in benchmarks/results.
*Emulated* ones compile for sm_80 and newer and pass these tests, races and memory checks included,
under the emulator of [docs/cuda.md](docs/cuda.md); they await a run on a GPU. `linear` multiplies
on torch's cuBLAS there, and so does `linear_cross_entropy`."""


def support_table() -> str:
    """One row per OpSpec."""
    rows = [_row(spec) for spec in registry().values()]
    return "\n".join([_HEAD, *rows, "", _NOTE])


def variant_table() -> str:
    """One row per published form."""
    rows = [_variant_row(variant) for variant in VARIANTS]
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
    parser = argparse.ArgumentParser(description="Writes the README's table of supported ops.")
    parser.add_argument("readme", type=Path, nargs="?", default=Path("README.md"))
    parser.add_argument("--check", action="store_true", help="exit 1 if it is out of date")
    args = parser.parse_args()
    text = args.readme.read_text()
    wanted = replace_block(text, "support table", support_table())
    wanted = replace_block(wanted, "variant table", variant_table())
    if args.check:
        hint = f"{args.readme} is out of date: run python -m omniattn.testing.table"
        sys.exit(hint if text != wanted else 0)
    args.readme.write_text(wanted)


if __name__ == "__main__":
    main()
