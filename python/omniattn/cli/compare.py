"""omniattn compare: trains mixers under one budget, with one report."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from typing import Any

from omniattn import compare
from omniattn.cli.config_file import read_model
from omniattn.cli.errors import CommandError, require


def run(args: argparse.Namespace) -> int:
    """Runs the comparison, and prints its tables; returns the exit code."""
    require("tqdm", "matplotlib")
    given = {
        field.name: getattr(args, field.name)
        for field in fields(compare.Settings)
        if getattr(args, field.name) is not None
    }
    options: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("parts", "tasks", "data")
        if getattr(args, name) is not None
    }
    try:
        settings = compare.Settings(**given)
        report = compare.run(_models(args), out=args.out, settings=settings, **options)
    except (ValueError, TypeError, FloatingPointError) as error:
        ours, _, text = str(error).partition(": ")
        if ours not in ("compare", "Settings"):  # an error inside a user's module
            raise
        raise CommandError(text) from error
    except OSError as error:
        raise CommandError(f"cannot use {error.filename}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        again = shlex.join(sys.argv[1:])
        print(f"interrupted; nothing is lost, continue with: python -m omniattn {again}")
        return 130
    print(report.markdown)
    print(f"wrote compare.md and compare.png in {report.folder}")
    return 0


def _models(args: argparse.Namespace) -> list[Any]:
    if args.models is None:
        return list(compare.DEFAULT_MODELS)
    return [m if isinstance(m, str) else read_model(*m) for m in args.models]
