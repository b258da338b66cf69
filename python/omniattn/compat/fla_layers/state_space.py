"""Mamba, Mamba-2, log-linear Mamba-2 and Mamba-3 of `fla.layers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from omniattn import modules
from omniattn.checks.arguments import require_tensor, shown
from omniattn.compat._errors import require_form, require_real
from omniattn.compat.fla_layers.base import Result, get_layer_cache, update_layer_cache

#: The number of levels of fla's log-linear attention, for up to 2^14 tokens.
_LEVELS = 15


class _StateSpace:
    """Forward of fla's layers on that of the layers of this package."""

    layer_idx: int | None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; `cu_seqlens` are the boundaries of packed sequences.

        The cache has the states of the layer of this package, which are for inference, without
        gradients. Unlike in fla, several tokens may follow cached ones.
        """
        op, layer = type(self).__name__, cast(Any, super())
        require_real(op, hidden_states=hidden_states)
        require_form(op, "hidden_states", hidden_states, "B, T, hidden_size")
        tokens, cu = hidden_states.shape[1], kwargs.get("cu_seqlens")
        if cu is not None:
            if past_key_values is not None or attention_mask is not None or len(hidden_states) != 1:
                raise ValueError(
                    f"{op}: cu_seqlens needs B = 1 and neither past_key_values nor "
                    f"attention_mask, got hidden_states.shape={tuple(hidden_states.shape)}"
                )
            nested = torch.nested.nested_tensor_from_jagged(hidden_states[0], cu.long())
            packed: Tensor = layer.forward(nested)
            return packed.values()[None], None, None
        state = None
        if past_key_values is not None:
            kept = get_layer_cache(cast(Any, self), past_key_values)
            state = (
                layer.new_state(len(hidden_states), 0) if kept is None else kept["recurrent_state"]
            )
        mask = None
        if attention_mask is not None:
            require_tensor(op, "attention_mask", attention_mask)
            count = tokens + (0 if state is None else state.length)
            mask = attention_mask[:, None, None, -count:].bool()
        y = layer.forward(hidden_states, state=state, mask=mask)
        states = {"recurrent_state": state, "offset": tokens}
        update_layer_cache(cast(Any, self), past_key_values, **states)
        return y, None, past_key_values


def _require(op: str, given: Mapping[str, Any], **known: Any) -> None:
    """Requires values that the layers of this package have."""
    for name, value in known.items():
        if given[name] != value:
            raise NotImplementedError(
                f"{op}: {name} must be {value!r}, got {name}={shown(given[name])}"
            )


class Mamba(_StateSpace, modules.Mamba):  # type: ignore[misc]
    """Computes :class:`omniattn.modules.Mamba`, with fla's arguments, results and caches.

    Args:
        hidden_size: width of x and y.
        state_size, conv_kernel, use_conv_bias: d_state, d_conv and conv_bias there.
        intermediate_size: inner_dim there.
        dt_rank, dt_min, dt_max, dt_init, dt_scale, dt_init_floor: see there.
        use_bias: bias there.
        hidden_act: must be "silu".
        layer_idx: number of the layer, for a cache.
        backend: has no effect.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 16,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        intermediate_size: int = 2048,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        use_bias: bool = False,
        hidden_act: str = "silu",
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        _require("Mamba", locals(), hidden_act="silu")
        if isinstance(dt_rank, str):
            _require("Mamba", locals(), dt_rank="auto")
        super().__init__(
            modules.Mamba.Config(
                hidden_size,
                state_size,
                conv_kernel,
                inner_dim=intermediate_size,
                dt_rank=None if isinstance(dt_rank, str) else dt_rank,
                dt_min=dt_min,
                dt_max=dt_max,
                dt_init=dt_init,
                dt_scale=dt_scale,
                dt_init_floor=dt_init_floor,
                conv_bias=use_conv_bias,
                bias=use_bias,
            )
        )
        self.layer_idx = layer_idx


def _mamba2(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of Mamba2.Config for fla's arguments."""
    _require(
        op, given, hidden_act="silu", conv_init=None, D_has_hdim=False, rmsnorm=True,
        norm_before_gate=False, dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4,
    )  # fmt: skip
    width = int(given["expand"] * given["hidden_size"])
    heads, size = given["num_heads"], given["head_dim"]
    if heads and heads * size != width:
        raise ValueError(
            f"{op}: num_heads * head_dim must be expand * hidden_size, got num_heads={heads}, "
            f"head_dim={size}, expand * hidden_size={width}"
        )
    return {
        "dim": given["hidden_size"],
        "d_state": given["state_size"],
        "d_conv": given["conv_kernel"],
        "expand": given["expand"],
        "headdim": size,
        "ngroups": given["n_groups"],
        "dt_limit": tuple(given["dt_limit"]),
        "bias": given["use_bias"],
        "conv_bias": given["use_conv_bias"],
        "norm_eps": given["norm_eps"],
    }


class Mamba2(_StateSpace, modules.Mamba2):  # type: ignore[misc]
    """Computes :class:`omniattn.modules.Mamba2`, with fla's arguments, results and caches.

    Args:
        num_heads: expand * hidden_size / head_dim, or None.
        head_dim, state_size, expand, n_groups, conv_kernel: headdim, d_state and so on there.
        hidden_size: width of x and y.
        dt_limit, use_bias, use_conv_bias, norm_eps: dt_limit, bias, conv_bias and norm_eps there.
        conv_init, hidden_act, D_has_hdim, rmsnorm, norm_before_gate: must be fla's defaults.
        A_init_range, dt_min, dt_max, dt_init_floor: must be fla's defaults.
        chunk_size, backend: have no effect.
        layer_idx: number of the layer, for a cache.
    """

    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        options = _mamba2("Mamba2", locals())
        _require("Mamba2", {"A_init_range": tuple(A_init_range)}, A_init_range=(1, 16))
        super().__init__(modules.Mamba2.Config(**options))
        self.layer_idx = layer_idx


class LogLinearMamba2(_StateSpace, modules.LogLinearMamba2):  # type: ignore[misc]
    """Computes :class:`omniattn.modules.LogLinearMamba2` of 15 levels, with fla's arguments.

    Args:
        num_heads, head_dim, hidden_size, state_size, expand, n_groups, conv_kernel: see
            :class:`Mamba2`.
        conv_init, use_conv_bias, hidden_act, rmsnorm, D_has_hdim, norm_before_gate: see there.
        chunk_size, dt_limit, dt_min, dt_max, dt_init_floor, use_bias, norm_eps: see there.
        layer_idx, backend: see there.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = False,
        hidden_act: str = "silu",
        rmsnorm: bool = True,
        D_has_hdim: bool = False,
        norm_before_gate: bool = False,
        chunk_size: int = 64,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        use_bias: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        options = _mamba2("LogLinearMamba2", locals())
        super().__init__(modules.LogLinearMamba2.Config(**options, num_levels=_LEVELS))
        self.layer_idx = layer_idx


class Mamba3(_StateSpace, modules.Mamba3):  # type: ignore[misc]
    """Computes :class:`omniattn.modules.Mamba3` with softplus decays, and fla's arguments.

    Args:
        hidden_size: width of x and y.
        state_size, expand, head_dim, n_groups, rope_fraction: d_state, headdim and so on there.
        A_floor, is_outproj_norm, is_mimo, mimo_rank, norm_eps: see there.
        dt_min, dt_max, dt_init_floor: must be fla's defaults.
        chunk_size: has no effect.
        use_bias: must be False.
        layer_idx: number of the layer, for a cache.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int = 64,
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        known = {"dt_min": 0.001, "dt_max": 0.1, "dt_init_floor": 1e-4, "use_bias": False}
        _require("Mamba3", locals(), **known)
        config = modules.Mamba3.Config(
            hidden_size,
            state_size,
            expand,
            head_dim,
            n_groups,
            rope_fraction,
            "softplus",
            A_floor,
            is_mimo,
            mimo_rank,
            is_outproj_norm,
            norm_eps,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx = layer_idx
