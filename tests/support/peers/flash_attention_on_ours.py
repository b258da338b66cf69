"""The functions of flash-attention 2, as its tests call them, by ours."""

import functools

import pytest

from omniattn.compat import flash_attn


def without_dropout(function):
    """The function, whose tests with dropout are skipped."""

    @functools.wraps(function)
    def call(*args, **options):
        if options.get("dropout_p"):
            pytest.skip("dropout draws other bits")
        return function(*args, **options)

    return call


def apply_rotary_emb(x, *args, inplace=False, **options):
    if inplace and x.requires_grad:
        x = x.clone()  # theirs writes over the leaf and its gradient
    return flash_attn.apply_rotary_emb(x, *args, inplace=inplace, **options)


NAMES = {
    name: without_dropout(getattr(flash_attn, name))
    for name in flash_attn.__all__
    if "attn_" in name or "rotary_" in name
} | {"apply_rotary_emb": apply_rotary_emb}
