"""Compares two benchmark records by their ratios, which depend little on machine and load.

    python benchmarks/compare.py old.json new.json [--threshold 0.1]

Prints every case whose ratio to a baseline, or share of the ceiling, changed by more than the
threshold; the exit code is 1 if one got worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def measures(path: Path) -> dict[tuple[str, ...], float]:
    """Returns figures of merit by case: speed-up over each baseline, our share of the ceiling."""
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        case = tuple(row[k] for k in ("op", "case", "dtype", "pass"))
        if row["provider"] == "ours":
            found[(*case, "of ceiling")] = row["of_ceiling"]
        else:
            found[(*case, "x " + row["provider"])] = row["ratio"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.1, help="relative change to report")
    args = parser.parse_args()
    old, new = measures(args.old), measures(args.new)
    worse = 0
    for key in old.keys() & new.keys():
        change = new[key] / old[key] - 1 if old[key] else 0.0
        if abs(change) > args.threshold:
            worse += change < 0
            print(f"{' '.join(key):80} {old[key]:8.2f} -> {new[key]:8.2f}  {change:+.0%}")
    for key in sorted(old.keys() ^ new.keys()):
        print(f"{' '.join(key):80} only in {'the old' if key in old else 'the new'} record")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
