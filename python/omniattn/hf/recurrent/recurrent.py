"""Replaces the convolutions and recurrences of transformers' layers by this package's."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.functional.recurrences._steps import causal_conv1d_inplace, in_place
from omniattn.hf.common.packed import active, packing_of, refuse
from omniattn.hf.common.probe import Finding, Forward, Left, draws, own_copy, probing, takes
from omniattn.hf.common.rescope import rescoped
from omniattn.hf.recurrent.lightning import lightning_forward
from omniattn.hf.recurrent.scans import SCANS, same_scan

__all__ = ["recurrent_forward"]


@functools.cache
def recurrent_forward(kind: Any) -> Finding:
    """Returns a layer's forward with our functions in place of those its source file uses.

    Replaces short convolutions, the gated delta rules of Qwen3-Next, OLMo hybrid and Kimi Linear,
    RWKV's weighted mean and the scans of state-space models; and whole modules for xLSTM's cell and
    MiniMax's lightning attention.
    """
    if kind.__name__ == "xLSTMBackend":
        return _xlstm_cell(kind)
    if kind.__name__ == "MiniMaxLightningAttention":
        return lightning_forward(kind)
    scope = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    used = getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ())
    ours: dict[str, Forward] = {}
    for name in used:
        original = scope.get(name)
        if name not in _MAKERS or original is None:
            continue
        original = _on_each_device(original)
        made = _MAKERS[name](original)
        known = set(inspect.signature(made).parameters)
        theirs = inspect.signature(original).parameters.values()
        further = {p.name for p in theirs if p.kind is not p.VAR_KEYWORD} - known
        if further:
            return Left(f"its {name} takes {', '.join(sorted(further))}")
        with probing():
            if not _same(name, original, made):
                return Left(f"its {name} computes something else", logging.WARNING)
        ours[name] = made
    return rescoped(kind.forward, ours) if ours else None


def _on_each_device(original: Forward) -> Forward:
    """Makes a GPU package's kernel `original` run transformers' own code on the CPU."""
    reference: Forward = inspect.unwrap(original)
    if reference is original:
        return original

    @functools.wraps(reference)
    def either(*args: Any, **kwargs: Any) -> Any:
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        return (reference if takes(next(tensors)) else original)(*args, **kwargs)

    return either


def _fused(original: Forward) -> Forward:
    @functools.wraps(original)
    def fused(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns None on the CPU, where the layer then calls the unfused functions, ours."""
        if x.is_cpu:
            return None
        refuse(active(), original.__name__, kwargs)
        return original(x, *args, **kwargs)

    return fused


def _convolution(original: Forward) -> Forward:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps hidden_states (B, D, T), with weight (D, K), to the same shape."""
        packing = packing_of(hidden_states, kwargs, steps=2)
        if not takes(hidden_states, activation):
            refuse(packing, original.__name__, kwargs)
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        x = hidden_states.to(weight.dtype).mT
        options: dict[str, Any] = {"activation": activation and "silu"}
        if packing is None:
            y = functional.causal_conv1d(x, weight, bias, **options)
        else:
            options["cu_seqlens"] = packing.cu_seqlens
            y = packing.split(functional.causal_conv1d(packing.join(x), weight, bias, **options))
        return y.mT.to(hidden_states.dtype)

    return causal_conv1d_fn


def _convolution_step(original: Forward) -> Forward:
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Convolves hidden_states (B, D, T) after the inputs in conv_state, and updates it."""
        before = weight.shape[-1] - 1
        if not takes(hidden_states, activation) or conv_state.shape[-1] < before:
            return original(hidden_states, conv_state, weight, bias, activation, **kwargs)
        x, length = hidden_states.to(weight.dtype), conv_state.shape[-1]
        fits = x.shape[-1] == 1 and x.dtype == conv_state.dtype
        if fits and in_place(x, weight, conv_state):
            silu = activation is not None
            stepped: Tensor = causal_conv1d_inplace(x.mT, weight, bias, conv_state, silu)
            return stepped.mT.to(hidden_states.dtype)
        initial = own_copy(conv_state[..., length - before :])
        y = functional.causal_conv1d(
            x.mT,
            weight,
            bias,
            activation=activation and "silu",
            initial_state=initial.to(weight.dtype),
        )
        conv_state.copy_(torch.cat((conv_state.to(x.dtype), x), -1)[..., -length:])
        return y.mT.to(hidden_states.dtype)

    return causal_conv1d_update


def _delta_rule(ours: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Forward], Forward]:
    def make(original: Forward) -> Forward:
        def delta_rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            """Calls the rule of `functional`; chunk_size has no effect."""
            packing = packing_of(query, kwargs)
            if not takes(query):
                refuse(packing, original.__name__, kwargs)
                kwargs["initial_state"] = initial_state
                kwargs["output_final_state"] = output_final_state
                kwargs["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
                theirs: tuple[Tensor, Tensor | None] = original(
                    query, key, value, g=g, beta=beta, **kwargs
                )
                return theirs
            norm = use_qk_l2norm_in_kernel
            rows: tuple[Tensor, ...] = (query, key, value, g, beta)
            initial = None if initial_state is None else own_copy(initial_state)
            options: dict[str, Any] = {"l2norm": norm, "initial_state": initial}
            if packing is not None:
                rows = tuple(map(packing.join, rows))
                options["initial_state"] = packing.spread(initial)
                options["cu_seqlens"] = packing.cu_seqlens
            o, state = ours(*rows, **options)
            if packing is not None:
                o, state = packing.split(o), packing.last(state)
            return o, state if output_final_state else None

        return delta_rule

    return make


def _wkv(original: Forward) -> Forward:
    def rwkv_linear_attention(
        time_decay: Tensor,
        time_first: Tensor,
        key: Tensor,
        value: Tensor,
        state: list[Tensor] | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Takes key and value (B, T, C); state: numerator, denominator and maximum, each (B, C)."""
        refuse(active(), original.__name__)
        if not takes(key):
            theirs: tuple[Tensor, list[Tensor] | None] = original(
                time_decay, time_first, key, value, state=state, return_state=return_state
            )
            return theirs
        before = None if state is None else torch.stack(tuple(state), 1)
        y, after = functional.rwkv4(time_decay.exp(), time_first, key, value, initial_state=before)
        return y, list(after.unbind(1)) if return_state or state is not None else None

    return rwkv_linear_attention


def _xlstm_cell(kind: Any) -> Finding:
    """Returns our forward for xLSTM's module that computes only the mLSTM cell."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        """Takes query, key, value (B, H, T, size), gates (B, H, T), m_initial (B, H, 1)."""
        before, how = (c_initial, n_initial, m_initial), mode or self.config.mode
        given = [t for t in before if t is not None]
        # In inference mode transformers rounds the states to a dtype of the config.
        rounded = how == "inference" and self.config.inference_state_dtype != "float32"
        known = how in ("train", "inference") and not rounded
        packing = packing_of(query, steps=2)
        if not takes(query) or not known or len(given) not in (0, 3):
            refuse(packing, kind.__name__)
            gates = {"igate": igate, "fgate": fgate}
            initial = dict(zip(("c_initial", "n_initial", "m_initial"), before, strict=True))
            options = {"return_last_states": return_last_states, "mode": mode}
            return kind.forward(self, query, key, value, **gates, **initial, **options)
        given = [own_copy(t) for t in given]
        if packing is not None:
            given = [t for t in map(packing.spread, given) if t is not None]
        query = query * query.shape[-1] ** -0.5  # transformers scales the query, not the key
        rows = [t.transpose(1, 2) for t in (query, key, value, igate[..., None], fgate[..., None])]
        if packing is not None:
            rows = [packing.join(t) for t in rows]
        q, k, v, i, f = rows
        h, (c, n, m) = functional.mlstm(
            q,
            k,
            v,
            i[..., 0],
            f[..., 0],
            scale=1.0,
            eps=self.config.eps,
            initial_state=(given[0], given[1], given[2][..., 0]) if given else None,
            cu_seqlens=None if packing is None else packing.cu_seqlens,
        )
        if packing is not None:
            h, (c, n, m) = packing.split(h), map(packing.last, (c, n, m))
        if how == "train" and return_last_states is None:
            return_last_states = self.config.return_last_states
        h = h.transpose(1, 2)
        return (h, (c, n, m[..., None])) if how == "inference" or return_last_states else h

    further = set(inspect.signature(kind.forward).parameters) - set(
        inspect.signature(forward).parameters
    )
    if further:
        return Left(f"its forward takes {', '.join(sorted(further))}")
    with probing():
        same = _same_cell(kind, forward)
    return forward if same else Left("its cell computes something else", logging.WARNING)


def _same_cell(kind: Any, ours: Forward) -> bool:
    """Returns True if both cells agree on a probe, also from an initial state and for one step."""
    draw = draws()
    dtypes = dict.fromkeys(("autocast_kernel_dtype", "inference_state_dtype"), "float32")
    options = {"mode": "inference", "chunk_size": 16, "eps": 1e-6, "return_last_states": True}
    cell = kind(SimpleNamespace(**dtypes, **options))
    states: dict[Forward, dict[str, Tensor]] = {kind.forward: {}, ours: {}}
    for steps in (19, 1):
        rows = [draw(1, 2, steps, 4) for _ in range(3)]
        gates = [draw(1, 2, steps) for _ in range(2)]
        found = []
        for forward, before in states.items():
            h, after = forward(cell, *rows, *gates, **before)
            before |= zip(("c_initial", "n_initial", "m_initial"), after, strict=True)
            found.append((h, *after))
        for theirs, own in zip(*found, strict=True):
            if not torch.allclose(theirs, own, rtol=1e-3, atol=1e-4):
                return False
    return True


_HEADS = _delta_rule(functional.gated_delta_rule)
_CHANNELS = _delta_rule(functional.kimi_delta_attention)
#: Fused layers that exist only in GPU packages.
_FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
#: Name of transformers' function -> maker of ours.
_MAKERS: dict[str, Callable[[Forward], Forward]] = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
    "torch_chunk_gated_delta_rule": _HEADS,
    "torch_recurrent_gated_delta_rule": _HEADS,
    "chunk_kimi_delta_attention": _CHANNELS,
    "recurrent_kimi_delta_attention": _CHANNELS,
    "rwkv_linear_attention": _wkv,
    **SCANS,
    **dict.fromkeys(_FUSED, _fused),
}


def _same(name: str, original: Forward, ours: Forward) -> bool:
    """Returns True if both functions give equal results on a probe."""
    if name in _FUSED:
        return True
    draw = draws()
    if name in SCANS:
        calls: list[tuple[Tensor, ...]] = same_scan(name, original, ours)
    elif name.startswith("causal_conv1d"):
        x, weight, state = draw(1, 6, 5), draw(6, 4), draw(1, 6, 4)
        if name == "causal_conv1d_fn":
            calls = [(f(x, weight, activation="silu"),) for f in (original, ours)]
        else:
            states = [state.clone() for _ in range(2)]
            x = x[..., :1]
            pairs = zip((original, ours), states, strict=True)
            calls = [(f(x, s, weight, None, "silu"), s) for f, s in pairs]
    elif name == "rwkv_linear_attention":
        w, u, k, v = draw(4), draw(4), draw(1, 5, 4), draw(1, 5, 4)
        state = draw(1, 3, 4).abs()
        found = [f(w, u, k, v, list(state.unbind(1)), True) for f in (original, ours)]
        calls = [(y, *after) for y, after in found]
    else:
        q, k, v = draw(1, 5, 2, 4), draw(1, 5, 2, 4), draw(1, 5, 2, 4)
        g = draw(1, 5, 2, 4) if "kimi" in name else draw(1, 5, 2)
        options = {
            "g": -g.abs(),
            "beta": draw(1, 5, 2).sigmoid(),
            "initial_state": draw(1, 2, 4, 4),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        calls = [f(q, k, v, **options) for f in (original, ours)]
    return all(
        torch.allclose(theirs.float(), own.float(), rtol=1e-4, atol=1e-5)
        for theirs, own in zip(*calls, strict=True)
    )
