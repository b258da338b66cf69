"""Rows of goals.py against transformers' Mamba without kernels, which takes minutes a call.

    python benchmarks/goals.py --group "slow paths"

The gradient of each of its T indexing operations has all T steps, so the time grows with T^2.
A shorter call would flatter it; it is called only once instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baselines import BASELINES

from goal_rows.goal import Row, called_once, provider
from goal_rows.scans import selective, selective_work, training_step
from omniattn import functional
from omniattn.testing.spec import Pass


def rows(length: int = 1024) -> Iterator[Row]:
    pass_: Pass = "forward+backward"
    named = selective(1, length)
    scan = Row(
        f"selective scan L{length} E1536 N16",
        pass_,
        provider(pass_, named, functional.selective_scan, delta_softplus=True),
        provider(pass_, named, BASELINES["selective_scan"]["hf"], delta_softplus=True),
        "transformers without kernels",
        1 / 3000,
        **selective_work(named, pass_),
        same=True,
    )
    for row in (scan, training_step("Mamba", length, 1 / 100)):
        yield replace(row, **called_once(row.yardstick))
