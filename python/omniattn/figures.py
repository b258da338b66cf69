"""Figures that need no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(**options: Any) -> Figure:
    """Returns an empty figure that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.figure(layout="constrained", **options)


def save_figure(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Writes and closes a figure."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
