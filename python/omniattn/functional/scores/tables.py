"""Relative position terms that are read from a table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from omniattn.checks.arguments import require_float, require_int, require_pair, require_strided
from omniattn.encoding.options import EncodedRows, EncodedTerm, ScoreKind, ScoreRule


class RelativeBias(EncodedTerm):
    """A learned term that depends on the positions of query and key, read from a table."""


@dataclass(frozen=True)
class T5Bias(RelativeBias):
    """T5's bias, table[bucket(k - i)] (num_buckets, Hq), with logarithmic buckets for far keys.

    `bidirectional` for encoders; decoders give all buckets to keys before the query. Raffel et al.,
    Exploring the Limits of Transfer Learning, 2020, arXiv:1910.10683.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        require_float("T5Bias", "table", self.table)
        require_strided("T5Bias", "table", self.table)
        require_int("T5Bias", "max_distance", self.max_distance, 1)
        if self.table.dim() != 2:
            raise ValueError(
                f"T5Bias: table must have shape (num_buckets, Hq), "
                f"got table.shape={tuple(self.table.shape)}"
            )
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if not 1 <= exact < self.max_distance:
            raise ValueError(
                f"T5Bias: num_buckets must be at least {4 if self.bidirectional else 2} and below "
                f"max_distance, got table.shape={tuple(self.table.shape)}, "
                f"max_distance={self.max_distance}"
            )

    def rule(self) -> ScoreRule:
        parameters = (float(self.bidirectional), float(self.max_distance))
        return (ScoreKind.BUCKETS, self.table[None], parameters)


def _require_zero(name: str, zero: int, rows: int) -> None:
    require_int(name, "zero", zero, -rows, rows - 1)


@dataclass(frozen=True)
class DistanceBias(RelativeBias):
    """table[k - i + zero] (rows, Hq), the index clamped to the table; row `zero` is k = i.

    A negative zero counts from the end, as in Python.
    """

    table: Tensor
    zero: int

    def __post_init__(self) -> None:
        require_float("DistanceBias", "table", self.table)
        require_strided("DistanceBias", "table", self.table)
        if self.table.dim() != 2 or self.table.shape[0] < 1:
            raise ValueError(
                f"DistanceBias: table must have shape (rows >= 1, Hq), "
                f"got table.shape={tuple(self.table.shape)}"
            )
        _require_zero("DistanceBias", self.zero, self.table.shape[0])

    def rule(self) -> ScoreRule:
        return (ScoreKind.DISTANCES, self.table[None], (float(self.zero), 0.0))


@dataclass(frozen=True)
class DistanceRows(EncodedRows):
    """Vectors rows[k - i + zero] (rows, Hq, D), the index clamped; row `zero` is k = i, and a
    negative zero counts from the end, as in Python.

    For `relative_keys` and `relative_queries` of :func:`attention`.
    """

    def __post_init__(self) -> None:
        require_float("DistanceRows", "rows", self.rows)
        require_strided("DistanceRows", "rows", self.rows)
        if self.rows.dim() != 3 or self.rows.shape[0] < 1:
            raise ValueError(
                f"DistanceRows: rows must have shape (rows >= 1, Hq, D), "
                f"got rows.shape={tuple(self.rows.shape)}"
            )
        _require_zero("DistanceRows", self.zero, self.rows.shape[0])


@dataclass(frozen=True)
class WindowBias(RelativeBias):
    """table[(yq - yk + h - 1) (2w - 1) + xq - xk + w - 1] ((2h - 1)(2w - 1), Hq) in h x w windows.

    The tokens of `window` = (h, w) come row by row, Tq = Tk = h w. Liu et al., Swin Transformer,
    2021, arXiv:2103.14030.
    """

    table: Tensor
    window: tuple[int, int]

    def __post_init__(self) -> None:
        require_float("WindowBias", "table", self.table)
        require_strided("WindowBias", "table", self.table)
        require_pair("WindowBias", "window", self.window, 1)
        height, width = self.window
        rows = (2 * height - 1) * (2 * width - 1)
        if self.table.dim() != 2 or self.table.shape[0] != rows:
            raise ValueError(
                f"WindowBias: table must have shape ((2h - 1)(2w - 1), Hq) for window (h, w), "
                f"got table.shape={tuple(self.table.shape)}, window={self.window}"
            )

    def rule(self) -> ScoreRule:
        height, width = self.window
        return (ScoreKind.WINDOW, self.table[None], (float(height), float(width)))
