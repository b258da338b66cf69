"""Options, states and gates shared by fla's functions."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Set
from itertools import pairwise
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_number, require_tensor, shown
from omniattn.compat._cp import boundaries_of_rank, call_on_ranks
from omniattn.compat._errors import errors_of
from omniattn.reference.precision import widen
from omniattn.suggestions import did_you_mean

Result: TypeAlias = tuple[Tensor, Tensor | None]
#: A function of `omniattn.functional` that computes an fla function, and its tensors (B, T, ..).
Call: TypeAlias = tuple[Callable[..., tuple[Tensor, Any]], tuple[Tensor, ...]]
Theirs = ParamSpec("Theirs")

_SPEED = {"cu_seqlens_cpu", "chunk_indices", "chunk_size", "disable_recompute"}
_OPTIONS = {"scale": "scale", "use_qk_l2norm_in_kernel": "l2norm"}
_NOT_SUPPORTED = {"gv"}
#: Tokens between the states that `return_intermediate_states` returns.
_CHUNK = 64


def fla_function(
    *,
    without_effect: Set[str] = frozenset(),
    also: Set[str] = frozenset(),
    returns: Any = Result,
) -> Callable[[Callable[Theirs, Call]], Callable[Theirs, Any]]:
    """Makes an fla function from one with its signature that returns a `Call`.

    Handles the shared options in the signature: scale, l2norm, states, boundaries and direction.
    Ignores options that only affect speed and the options `without_effect`; others must be None or
    False, unless they are in `also`. The function is annotated to return `returns`.
    """

    def decorate(choose: Callable[Theirs, Call]) -> Callable[Theirs, Any]:
        signature = inspect.signature(choose)
        named = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        required = [
            n for n, p in named.items() if p.annotation == "Tensor" and p.default is p.empty
        ]
        defaults = {n: p.default for n, p in named.items() if p.default is not p.empty}
        taken = _SPEED | without_effect | (named.keys() - _NOT_SUPPORTED) | also
        if "state_v_first" in named:
            taken = taken | {"transpose_state_layout"}

        @functools.wraps(choose)
        def function(*args: Theirs.args, **kwargs: Theirs.kwargs) -> Any:
            given = {**defaults, **dict(zip(named, args, strict=False)), **kwargs}
            present = {n: given[n] for n in required if n in given}
            require_inputs(choose.__name__, given.get("scale"), **present)
            call, tensors = choose(*args, **kwargs)
            if kwargs.get("transpose_state_layout") is not None and "state_v_first" in named:
                _warn_of_former_name(choose.__name__, bool(given["state_v_first"]))
            for name, value in given.items():
                if name not in taken and value is not None and value is not False:
                    near = "" if name in _NOT_SUPPORTED else did_you_mean(name, named)
                    raise NotImplementedError(
                        f"{choose.__name__}: {name} is not supported, "
                        f"got {name}={shown(value)}{near}"
                    )
            chunks = given.get("return_intermediate_states")
            if chunks and given.get("cp_context") is not None:
                raise ValueError(
                    f"{choose.__name__}: return_intermediate_states must be False with cp_context, "
                    "got return_intermediate_states=True"
                )
            found = run(choose.__name__, call, tensors, given)
            if chunks:
                states = _states_of_chunks(choose.__name__, call, tensors, given)
                return (*found, states)
            return found

        function.__annotations__ = {**choose.__annotations__, "return": returns}
        returned = signature.replace(return_annotation=returns)
        function.__signature__ = returned  # type: ignore[attr-defined]
        return function

    return decorate


def _warn_of_former_name(op: str, also: bool) -> None:
    if also:
        raise ValueError(
            f"{op}: transpose_state_layout must be left out where state_v_first is given, "
            "got state_v_first=True"
        )
    warnings.warn(
        f"{op}: transpose_state_layout is called state_v_first now",
        DeprecationWarning,
        stacklevel=4,
    )


def require_inputs(op: str, scale: object, **tensors: Any) -> None:
    """Checks arguments that an alias uses before it calls `omniattn.functional`."""
    for name, t in tensors.items():
        require_tensor(op, name, t)
    if scale is not None:
        require_number(op, "scale", scale)


def run(
    op: str,
    call: Callable[..., tuple[Tensor, Any]],
    tensors: tuple[Tensor, ...],
    given: Mapping[str, Any],
) -> tuple[Tensor, Any]:
    """Runs `call` on the tensors, with the states and options in `given`."""
    boundaries, state = given["cu_seqlens"], given["initial_state"]
    context = given.get("cp_context")
    if context is not None:
        boundaries = boundaries_of_rank(op, context, boundaries)
    reverse = given.get("reverse", False)
    v_first = given.get("state_v_first", False) or given.get("transpose_state_layout", False)
    packed = reverse and boundaries is not None
    if reverse:
        tensors = tuple(t.flip(1) for t in tensors)
    if isinstance(state, list):
        state = tuple(state)
    if state is not None and v_first:
        state = state.mT
    if packed:  # flipping the row reverses the order of the sequences
        boundaries = tensors[0].shape[1] - boundaries.flip(0)
        state = _flipped(state)
    options = {ours: given[name] for name, ours in _OPTIONS.items() if name in given}
    gates = {"g": "gk"} if given.get("gk") is not None else {}
    with errors_of(op, l2norm="use_qk_l2norm_in_kernel", **gates):
        options |= {"initial_state": state, "cu_seqlens": boundaries}
        if context is None:
            o, state = call(*tensors, **options)
        else:
            o, state = call_on_ranks(context, call, tensors, **options)
    if packed:
        state = _flipped(state)
    if v_first:
        state = state.mT
    return o.flip(1) if reverse else o, state if given["output_final_state"] else None


def _flipped(state: Any) -> Any:
    """Returns a state, or the tensors of one, with the sequences in reverse."""
    if isinstance(state, tuple):
        return tuple(map(_flipped, state))
    return state.flip(0) if isinstance(state, Tensor) else state


def _states_of_chunks(
    op: str,
    call: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    given: Mapping[str, Any],
) -> Tensor:
    """Returns the states (B, NT, H, K, V) before each chunk of 64 tokens, in the dtype of v."""
    boundaries, initial = given["cu_seqlens"], given["initial_state"]
    edges = [0, tensors[0].shape[1]] if boundaries is None else boundaries.tolist()
    options = {**given, "cu_seqlens": None, "output_final_state": True}
    states = []
    for n, (first, last) in enumerate(pairwise(edges)):
        state = initial
        if initial is not None and boundaries is not None:
            state = initial[n : n + 1]
        for start in range(first, last, _CHUNK):
            part = tuple(t[:, start : min(start + _CHUNK, last)] for t in tensors)
            after = run(op, call, part, {**options, "initial_state": state})[1]
            assert after is not None
            states.append(torch.zeros_like(after) if state is None else state)
            state = after
    dtype = tensors[2].dtype
    if not states:
        after = run(op, call, tensors, {**options, "initial_state": None})[1]
        assert after is not None
        return after[:, None][:, :0].to(dtype)
    return torch.stack([state.to(dtype) for state in states], 1)


def decays_of(
    op: str, g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, bound: float | None
) -> Tensor:
    """Computes log-decays from gates (B, T, H) or (B, T, H, K), A_log (H), dt_bias (H or H K)."""
    if a_log is None and bound is None:
        raise ValueError(
            f"{op}: A_log must be given with use_gate_in_kernel=True and without a lower_bound, "
            "got A_log=None"
        )
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


def delta_call(
    op: str,
    function: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    beta: Tensor,
) -> Call:
    """Returns the call of a delta rule, with beta (B, T, Hv), or (B, T, Hv, V) per channel."""
    require_tensor(op, "beta", beta)
    if beta.ndim != 4:
        return function, (*tensors, beta)
    v = tensors[2]
    if beta.shape != v.shape:
        raise ValueError(
            f"{op}: beta must have shape {tuple(v.shape[:3])} or {tuple(v.shape)}, got "
            f"beta.shape={tuple(beta.shape)}"
        )
    return functools.partial(_by_channels, function), (*tensors, beta)


def _by_channels(
    function: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes a rule with each value channel as a head, V times as slow; the last gate is beta."""
    sizes = v.shape[2:]
    wide = (t.repeat_interleave(sizes[1], 2) for t in gates[:-1])
    if initial_state is not None:
        initial_state = initial_state.mT.flatten(1, 2)[..., None]
    o, state = function(
        q,
        k,
        v.flatten(2)[..., None],
        *wide,
        gates[-1].flatten(2),
        initial_state=initial_state,
        **options,
    )
    return o.squeeze(-1).unflatten(2, sizes), state.squeeze(-1).unflatten(1, sizes).mT
