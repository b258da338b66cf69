"""What the functions of fla share: options, states and gates in fla's form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.reference.precision import widen

Result: TypeAlias = tuple[Tensor, Tensor | None]
# A function of ours and its tensors (B, T, ..), from the arguments of one of theirs.
Call: TypeAlias = tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Tensor, ...]]
Theirs = ParamSpec("Theirs")

_SPEED = {"cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute"}
_OPTIONS = {"scale": "scale", "use_qk_l2norm_in_kernel": "l2norm"}
_NOT_SUPPORTED = {"gv", "return_intermediate_states"}


def fla_function(
    *, without_effect: Set[str] = frozenset()
) -> Callable[[Callable[Theirs, Call]], Callable[Theirs, Result]]:
    """A function of theirs from what its arguments mean: a function of ours and its tensors.

    What their functions share is read from the signature: scale, l2norm, states, boundaries, the
    direction, and further options, among which those `without_effect` on results are ignored.
    """

    def decorate(choose: Callable[Theirs, Call]) -> Callable[Theirs, Result]:
        signature = inspect.signature(choose)
        named = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        defaults = {n: p.default for n, p in named.items() if p.default is not p.empty}
        taken = _SPEED | without_effect | named.keys() - _NOT_SUPPORTED

        @functools.wraps(choose)
        def function(*args: Theirs.args, **kwargs: Theirs.kwargs) -> Result:
            call, tensors = choose(*args, **kwargs)
            given = {**defaults, **dict(zip(named, args, strict=False)), **kwargs}
            for name, value in given.items():
                if name not in taken and value is not None and value is not False:
                    raise NotImplementedError(
                        f"{choose.__name__}: {name} is not supported, got {name}={value!r}"
                    )
            return run(choose.__name__, call, tensors, given)

        returned = signature.replace(return_annotation="Result")
        function.__signature__ = returned  # type: ignore[attr-defined]
        return function

    return decorate


def run(
    op: str,
    call: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    given: Mapping[str, Any],
) -> Result:
    """`call` with what a function of theirs was given."""
    boundaries, state = given["cu_seqlens"], given["initial_state"]
    reverse, v_first = given.get("reverse", False), given.get("state_v_first", False)
    if reverse and boundaries is not None:
        raise NotImplementedError(f"{op}: reverse must be False with cu_seqlens, got reverse=True")
    if reverse:
        tensors = tuple(t.flip(1) for t in tensors)
    if state is not None and v_first:
        state = state.mT
    options = {ours: given[name] for name, ours in _OPTIONS.items() if name in given}
    o, state = call(*tensors, initial_state=state, cu_seqlens=boundaries, **options)
    if v_first:
        state = state.mT
    return o.flip(1) if reverse else o, state if given["output_final_state"] else None


def decays_of(
    g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, bound: float | None
) -> Tensor:
    """Log-decays from raw gates (B, T, H) or (B, T, H, K), A_log (H) and dt_bias (H or H K)."""
    g = widen(g)
    if dt_bias is not None:
        g = g + dt_bias.view(g.shape[2:])
    rate = torch.ones(()) if a_log is None else a_log.exp().view(-1, *(1,) * (g.ndim - 3))
    return -rate * nnf.softplus(g) if bound is None else bound * (rate * g).sigmoid()


def beta_of(op: str, beta: Tensor, is_logit: bool, twice: bool) -> Tensor:
    if twice and not is_logit:
        raise ValueError(
            f"{op}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True, got "
            "use_beta_sigmoid_in_kernel=False"
        )
    if not is_logit:
        return beta
    return widen(beta).sigmoid() * (2 if twice else 1)
