"""NATTEN's neighborhood attention, with additional keys and values that all tokens see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_number, require_shape, shown
from omniattn.compat._errors import errors_as, errors_of, require_flags, require_form, require_real
from omniattn.compat.natten.functional import Result, attention, merge_attentions
from omniattn.suggestions import did_you_mean

#: One value for all axes, or one for each axis.
Ints = int | Sequence[int]
Bools = bool | Sequence[bool]
_BACKENDS = ("cutlass-fna", "hopper-fna", "blackwell-fna", "flex-fna")
#: Arguments of `attention` that affect only speed.
_KERNEL = (
    "backend",
    "q_tile_size",
    "kv_tile_size",
    "backward_q_tile_size",
    "backward_kv_tile_size",
    "backward_kv_splits",
    "backward_use_pt_reduction",
    "run_persistent_kernel",
    "kernel_schedule",
    "torch_compile",
)
_CALLS: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    4: functional.na1d,
    5: functional.na2d,
    6: functional.na3d,
}


def neighborhood_attention_generic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints | None = 1,
    dilation: Ints | None = 1,
    is_causal: Bools | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: object = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes :func:`functional.na1d`, `na2d` or `na3d`, by the dimensions of query.

    Args:
        query: (B, X, H, D), (B, Y, X, H, D) or (B, Z, Y, X, H, D).
        key: (B, ..., Hkv, D) in the same grid.
        value: (B, ..., Hkv, Dv).
        kernel_size, stride, dilation, is_causal: the neighborhood, see :func:`functional.na2d`;
            one value for all axes, or one for each. None is 1 or False.
        scale: factor of q k^T; None and 0 are 1 / sqrt(D).
        additional_keys: (B, T, Hkv, D), keys that all tokens see besides their neighborhood.
        additional_values: (B, T, Hkv, Dv), given with `additional_keys`.
        attention_kwargs: options of the kernels of :func:`attention`, which have no effect.
        backend: one of NATTEN's names; has no effect, as the next ones.
        q_tile_shape, kv_tile_shape, backward_q_tile_shape, backward_kv_tile_shape: have no effect.
        backward_kv_splits, backward_use_pt_reduction, run_persistent_kernel: have no effect.
        kernel_schedule, torch_compile: have no effect.
        return_lse: if True, returns (O, lse) with lse (B, ..., H).

    Returns:
        O (B, ..., H, Dv).
    """
    options = kernel_size, stride, dilation, is_causal
    extra = additional_keys, additional_values, attention_kwargs
    call = "neighborhood_attention_generic", None, (query, key, value)
    return _neighborhood(*call, options, scale, extra, backend, return_lse)


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints | None = 1,
    dilation: Ints | None = 1,
    is_causal: Bools | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: object = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes neighborhood attention of a sequence, query (B, X, H, D).

    See :func:`neighborhood_attention_generic` for the arguments.
    """
    options = kernel_size, stride, dilation, is_causal
    extra = additional_keys, additional_values, attention_kwargs
    call = "na1d", 1, (query, key, value)
    return _neighborhood(*call, options, scale, extra, backend, return_lse)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints | None = 1,
    dilation: Ints | None = 1,
    is_causal: Bools | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: object = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes neighborhood attention in two dimensions, query (B, Y, X, H, D).

    See :func:`neighborhood_attention_generic` for the arguments.
    """
    options = kernel_size, stride, dilation, is_causal
    extra = additional_keys, additional_values, attention_kwargs
    call = "na2d", 2, (query, key, value)
    return _neighborhood(*call, options, scale, extra, backend, return_lse)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints | None = 1,
    dilation: Ints | None = 1,
    is_causal: Bools | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: object = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes neighborhood attention in three dimensions, query (B, Z, Y, X, H, D).

    See :func:`neighborhood_attention_generic` for the arguments.
    """
    options = kernel_size, stride, dilation, is_causal
    extra = additional_keys, additional_values, attention_kwargs
    call = "na3d", 3, (query, key, value)
    return _neighborhood(*call, options, scale, extra, backend, return_lse)


def _neighborhood(
    op: str,
    axes: int | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: tuple[Ints, Ints | None, Ints | None, Bools | None],
    scale: float | None,
    extra: tuple[Tensor | None, Tensor | None, dict[str, Any] | None],
    backend: str | None,
    return_lse: bool,
) -> Result:
    query, key, value = tensors
    keys, values, kernel = extra
    require_real(op, query=query, key=key, value=value)
    require_flags(op, return_lse=return_lse)
    if query.ndim not in ((4, 5, 6) if axes is None else (axes + 3,)):
        wanted = "4, 5 or 6" if axes is None else axes + 3
        raise ValueError(
            f"{op}: query must have {wanted} dimensions, got query.shape={tuple(query.shape)}"
        )
    if backend is not None:
        require_choice(op, "backend", backend, _BACKENDS)
    if scale is not None:
        require_number(op, "scale", scale)
    _require_kernel_options(op, kernel)
    if (keys is None) != (values is None):
        raise ValueError(
            f"{op}: additional_keys and additional_values must be given together, got "
            f"additional_keys={shown(keys)}, additional_values={shown(values)}"
        )
    size, stride, dilation, causal = options
    steps = (1 if n is None else _tuple(n) for n in (stride, dilation))
    grid = _tuple(size), *steps, False if causal is None else _tuple(causal)
    with errors_of(op):
        call = _CALLS[query.ndim]
        out, lse = call(query, key, value, *grid, scale=scale or None, return_lse=True)
    if keys is not None and values is not None:
        out, lse = _with_additional(op, tensors, (keys, values), scale, (out, lse))
    return (out, lse) if return_lse else out


def _with_additional(
    op: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    additional: tuple[Tensor, Tensor],
    scale: float | None,
    found: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns attention to the neighborhood and to additional keys."""
    query, keys, values = tensors[0], *additional
    require_real(op, additional_keys=keys, additional_values=values)
    for name, t, own in zip(("keys", "values"), additional, tensors[1:], strict=True):
        require_form(op, f"additional_{name}", t, "B, T, H, D")
        require_shape(op, f"additional_{name}", t, (len(own), keys.shape[1], *own.shape[-2:]))
    axes = query.ndim - 3
    shape = query.shape[1 : axes + 1]
    with errors_as(op, "attention"):
        result = attention(query.flatten(1, axes), keys, values, scale=scale, return_lse=True)
    out, lse = merge_attentions(
        [found[0].flatten(1, axes), result[0]], [found[1].flatten(1, axes), result[1]]
    )
    return out.unflatten(1, shape), lse.unflatten(1, shape)


def _require_kernel_options(op: str, options: dict[str, Any] | None) -> None:
    """Requires options that only affect the speed of NATTEN's attention."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"{op}: attention_kwargs must be a dict or None, got {shown(options)}")
    for name in options:
        if name not in _KERNEL:
            raise TypeError(
                f"{op}: attention_kwargs must have only {', '.join(_KERNEL)}, got {name!r}"
                f"{did_you_mean(name, _KERNEL) if isinstance(name, str) else ''}"
            )


def _tuple(value: Any) -> Any:
    """Returns the values of all axes as a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else value
