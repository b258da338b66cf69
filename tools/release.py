"""Gives the checked-out commit a version: python tools/release.py 0.2.0

Needs a clean tree and changes under "Unreleased" in CHANGELOG.md. Writes the version and the date,
commits that and tags it v0.2.0; pushes nothing.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "python/omniattn/__init__.py"  # pyproject.toml reads the version here
CHANGES = ROOT / "CHANGELOG.md"
_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_UNRELEASED = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def git(*command: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *command], text=True).strip()


def numbers(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"release: a version must be three numbers such as 0.2.0, got {version}")
    return tuple(int(part) for part in version.split("."))


def release(version: str) -> None:
    current = _VERSION.search(SOURCE.read_text(encoding="utf-8"))[1]
    if numbers(version) < numbers(current):
        sys.exit(f"release: the version must not fall, got {version} after {current}")
    if git("tag", "--list", f"v{version}"):
        sys.exit(f"release: v{version} is tagged already")
    if changed := git("status", "--porcelain"):
        sys.exit(f"release: the tree must be clean, got\n{changed}")
    changes = CHANGES.read_text(encoding="utf-8")
    unreleased = _UNRELEASED.search(changes)
    if not unreleased or not unreleased[1].strip():
        sys.exit(f'release: {CHANGES.name} must have changes under "## Unreleased"')

    source = SOURCE.read_text(encoding="utf-8")
    SOURCE.write_text(_VERSION.sub(f'__version__ = "{version}"', source), encoding="utf-8")
    title = f"## {version} ({datetime.date.today().isoformat()})\n"
    CHANGES.write_text(changes.replace("## Unreleased\n", title, 1), encoding="utf-8")
    git("commit", "--quiet", "--all", "--message", f"Version {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"omniattn {version}")
    print(f"v{version} is committed and tagged; publish it with: git push --follow-tags")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    release(parser.parse_args().version)
