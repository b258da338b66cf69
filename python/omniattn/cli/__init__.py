"""The command line: python -m omniattn {train, check, info, hub}."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from omniattn.cli import check, hub, info, train
from omniattn.cli.errors import CommandError

COMMANDS = (train, check, info, hub)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit code; expected failures are one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m omniattn", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample or a path may hold any character
    try:
        code: int = args.run(args)
        print(end="", flush=True)
    except CommandError as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is not None:
            raise
        # Otherwise the rest of the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{args.name}: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.name}: interrupted", file=sys.stderr)
        return 130
    return code
