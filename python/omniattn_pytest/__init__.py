"""pytest plugin of omniattn: run its own checks on your sizes, and on your functions.

    def test_my_attention(omniattn_check):
        omniattn_check("attention", B=2, Tq=333, Tk=333, H=8, G=2, D=80, causal=True)

    def test_my_variant(omniattn_check):
        omniattn_check(my_function, like="gated_linear_attention")

The plugin is a package of its own because importing anything of omniattn imports torch, which
pytest runs that do not use it should not pay for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def omniattn_check() -> Callable[..., Any]:
    """`check_op` of omniattn.testing for the name of an op, `check_function` for a function."""
    from omniattn.testing import check_function, check_op

    def check(op: str | Callable[..., Any], **options: Any) -> Any:
        return check_op(op, **options) if isinstance(op, str) else check_function(op, **options)

    return check
