"""pytest plugin of omniattn: run its own checks on your sizes.

    def test_my_attention(omniattn_check):
        omniattn_check("attention", B=2, Tq=333, Tk=333, H=8, G=2, D=80, causal=True)

The fixture is `omniattn.testing.check_op`. The plugin is a package of its own because importing
anything of omniattn imports torch, which pytest runs that do not use it should not pay for.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def omniattn_check() -> Any:
    """`check_op(op, *, dtypes, tensors, properties, **sizes_and_options)` of omniattn.testing."""
    from omniattn.testing import check_op

    return check_op
