"""Checks the properties of an op on a user's own sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omniattn.testing.properties import PROPERTIES
from omniattn.testing.registry import registry
from omniattn.testing.spec import FLOATS, Case

__all__ = ["check_op"]

_DEFAULT = ("forward", "backward", "strided", "poisoned", "deterministic", "every_isa")


def check_op(
    op: str,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    tensors: Sequence[str] = (),
    properties: Sequence[str] = _DEFAULT,
    **sizes_and_options: Any,
) -> None:
    """Checks one op on random inputs of these sizes.

    Args:
        op: name of a function of `omniattn.functional`.
        dtypes: default all four.
        tensors: optional tensor arguments to pass, e.g. ("bias", "mask"); see the registry's cases.
        properties: names in `omniattn.testing.properties.PROPERTIES`.
        sizes_and_options: capitalised names are sizes (B, Tq, D, ...; see the registry), the others
            are options of the op.

    Raises:
        AssertionError: a property does not hold.
        ValueError: the op or a property is unknown, or a size is missing.

    Example:
        >>> check_op("rms_norm", M=3, N=50, tensors=["weight"], offset=1.0)
    """
    specs = registry()
    if op not in specs:
        raise ValueError(f"check_op: op must be one of {', '.join(specs)}, got op={op!r}")
    unknown = [name for name in properties if name not in PROPERTIES]
    if unknown:
        raise ValueError(f"check_op: properties must be of {', '.join(PROPERTIES)}, got {unknown}")
    sizes = {k: v for k, v in sizes_and_options.items() if k[0].isupper()}
    options = {k: v for k, v in sizes_and_options.items() if not k[0].isupper()}
    needed = set.intersection(*(set(case.sizes) for case in specs[op].cases))
    if missing := sorted(needed - set(sizes)):
        raise ValueError(f"check_op: {op} needs sizes {sorted(needed)}, got none for {missing}")
    case = Case("user", sizes, tuple(tensors), options)
    for dtype in dtypes:
        for name in properties:
            PROPERTIES[name](specs[op], case, dtype)
