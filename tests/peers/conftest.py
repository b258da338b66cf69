"""Lists the names of peers that were skipped for want of a counterpart: one may be an oversight."""

import collections
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    reasons = (r.removeprefix("Skipped: ") for r in reasons)
    count = collections.Counter(r for r in reasons if r.endswith("has no counterpart"))
    for reason, cases in sorted(count.items()):
        terminalreporter.write_line(f"{reason} ({cases} cases)")
