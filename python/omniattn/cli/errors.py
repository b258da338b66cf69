"""Failures that a user can act on."""

from __future__ import annotations

import importlib.util


class CommandError(Exception):
    """Ends the command with its message and exit code 1, without a traceback."""


def require(*modules: str) -> None:
    """Raises unless these modules of the `train` extra are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"needs {', '.join(missing)}; install with: pip install 'omniattn[train]'"
        )
