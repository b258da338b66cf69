"""Checks the properties of an op on a user's own sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omniattn.suggestions import did_you_mean
from omniattn.testing.properties import PROPERTIES
from omniattn.testing.registry import registry
from omniattn.testing.spec import FLOATS, Case, OpSpec

__all__ = ["check_op", "require_properties", "require_sizes", "spec_named"]

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
    spec = spec_named("check_op", "op", op)
    require_properties("check_op", properties, PROPERTIES)
    sizes = {k: v for k, v in sizes_and_options.items() if k[0].isupper()}
    options = {k: v for k, v in sizes_and_options.items() if not k[0].isupper()}
    require_sizes("check_op", spec, sizes)
    case = Case("user", sizes, tuple(tensors), options)
    for dtype in dtypes:
        for name in properties:
            PROPERTIES[name](spec, case, dtype)


def spec_named(function: str, argument: str, op: str) -> OpSpec:
    """Returns the spec of the op `op`, which is an argument of `function`."""
    specs = registry()
    if op not in specs:
        raise ValueError(
            f"{function}: {argument} must be one of {', '.join(specs)}, "
            f"got {argument}={op!r}{did_you_mean(op, specs)}"
        )
    return specs[op]


def require_properties(
    function: str, properties: Sequence[str], known: Mapping[str, object]
) -> None:
    if unknown := [name for name in properties if name not in known]:
        raise ValueError(
            f"{function}: properties must be of {', '.join(known)}, "
            f"got {unknown}{did_you_mean(unknown[0], known)}"
        )


def require_sizes(function: str, spec: OpSpec, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless `sizes` has all sizes that every case of the op has, and no other
    than those of its cases."""
    each = [case.sizes for case in spec.cases]
    known = list(dict.fromkeys(name for case in each for name in case))
    needed = sorted(name for name in known if all(name in case for case in each))
    if missing := [name for name in needed if name not in sizes]:
        raise ValueError(f"{function}: {spec.name} needs sizes {needed}, got none for {missing}")
    if unknown := [name for name in sizes if name not in known]:
        got = ", ".join(f"{name}={sizes[name]}" for name in unknown)
        raise ValueError(
            f"{function}: sizes of {spec.name} must be of {', '.join(known)}, "
            f"got {got}{did_you_mean(unknown[0], known)}"
        )
