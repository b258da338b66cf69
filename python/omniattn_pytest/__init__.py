"""pytest plugin that runs omniattn's checks on your sizes and your functions.

    def test_my_attention(omniattn_check):
        omniattn_check("attention", B=2, Tq=333, Tk=333, H=8, G=2, D=80, causal=True)

    def test_my_variant(omniattn_check):
        omniattn_check(my_function, like="gated_linear_attention")

The plugin is a separate package, since any import of omniattn imports torch, which would slow down
pytest runs that do not use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def omniattn_check() -> Callable[..., Any]:
    """Returns a function that calls omniattn.testing's `check_op`, or `check_function`."""
    from omniattn.testing import check_function, check_op

    def check(op: str | Callable[..., Any], **options: Any) -> Any:
        return check_op(op, **options) if isinstance(op, str) else check_function(op, **options)

    return check
