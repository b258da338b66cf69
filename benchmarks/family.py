"""Runs all measurements on this family of CPUs and publishes them.

    python benchmarks/family.py [--quick] [--steps run goals linear levels] [--threads 2] [--force]

Runs run.py, goals.py (with memory returned and kept), linear_choice.py and level_choice.py one
after another. Each adds its records to those of other families; report.py then writes the pages.
Takes hours; an interrupted run keeps its records. --quick shortens run.py's rounds and runs the
others without recording.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import report

from omniattn.ops.dispatch.cpu import cpu_family

FOLDER = Path(__file__).parent


def commands(threads: int, quick: bool, force: bool) -> dict[str, list[list[str]]]:
    """Returns the commands of each step."""
    options = ["--threads", str(threads), *["--force"] * force, *["--quick"] * quick]
    choice = ["--seconds", "0.01"] if quick else ["--record"]
    return {
        "run": [["run.py", *options]],
        "goals": [["goals.py", *options], ["goals.py", "--keep-memory", *options]],
        "linear": [["linear_choice.py", *choice]],
        "levels": [["level_choice.py", "--threads", str(threads), *choice]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = commands(1, False, False)
    parser.add_argument("--steps", nargs="*", choices=list(steps), default=list(steps))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only few rounds")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    found = commands(args.threads, args.quick, args.force)
    print(f"family: {cpu_family()}")
    failed = False
    for step in args.steps:
        for command in found[step]:
            print("python benchmarks/" + " ".join(command), flush=True)
            failed |= bool(
                subprocess.run([sys.executable, FOLDER / command[0], *command[1:]]).returncode
            )
            report.publish()
    sys.exit(failed)


if __name__ == "__main__":
    main()
