"""The command line: omniattn {train, generate, check, info, calc, compare, hub}, or python -m ...

Arguments are parsed without importing torch, so that --help and usage errors are immediate.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import omniattn
from omniattn.cli.arguments import COMMANDS
from omniattn.cli.errors import CommandError
from omniattn.suggestions import did_you_mean


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        hint = self._hint(message)
        self.exit(2, f"{self.prog}: {message}{hint}; {self.prog} --help lists all options\n")

    def _hint(self, message: str) -> str:
        """Returns a suggestion for an unknown option or choice, or an empty string."""
        if found := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            return did_you_mean(found[1], self._option_string_actions)
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return did_you_mean(found[1], re.findall(r"[\w.-]+", found[2]))
        return ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; the command reports its unknown ones, as its --help lists the known."""
    formatter = argparse.RawDescriptionHelpFormatter
    description = (__doc__ or "").partition("\n")[0]
    parser = _Parser(prog="omniattn", description=description, formatter_class=formatter)
    version = f"omniattn {omniattn.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command", dest="name")
    for name, add_arguments in COMMANDS.items():
        text = add_arguments.__doc__ or ""
        description = "\n".join(line.removeprefix("    ") for line in text.splitlines())
        command = commands.add_parser(
            name, help=text.partition("\n")[0], description=description, formatter_class=formatter
        )
        add_arguments(command)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[args.name].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code; expected failures print one line to stderr."""
    args = _parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # samples and paths may contain any character
    try:
        omniattn.load()
        code: int = importlib.import_module(f"omniattn.cli.{args.name}").run(args)
        print(end="", flush=True)
    except CommandError as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is not None:
            raise
        # Without it, flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{args.name}: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.name}: interrupted", file=sys.stderr)
        return 130
    return code
