"""Errors that a user can fix."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CommandError(Exception):
    """Ends the command with its message and exit code 1, without a traceback."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a CommandError that names the path."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write to {path}: {error.strerror or error}") from error


def require(*modules: str) -> None:
    """Raises CommandError unless these modules of the `train` extra are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"needs {', '.join(missing)}; install with: pip install 'omniattn[train]'"
        )
