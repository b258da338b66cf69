"""mamba-ssm's Mamba and Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import modules
from omniattn.checks.arguments import require_int, shown
from omniattn.compat._errors import require_form, require_real
from omniattn.compat._mamba.parts import RMSNorm, layer_norm_fn
from omniattn.modules.base.state import RecurrentState

__all__ = ["Block", "GatedMLP", "Mamba", "Mamba2"]


class _Steps:
    """States of mamba-ssm's layers, and steps with them."""

    layer_idx: int | None
    #: Name of the state of the recurrence in the layer of this package.
    _name: str

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns zeros: the last d_conv inputs of the convolution, and the state.

        The first of the d_conv columns is never read.
        """
        state = self.new_state(batch_size, max_seqlen, dtype=dtype)  # type: ignore[attr-defined]
        conv = state["conv"]
        return conv.new_zeros(*conv.shape[:2], conv.shape[2] + 1), state[self._name]

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Maps a token (B, 1, d_model) to the same shape; updates and returns the states."""
        op = type(self).__name__
        require_form(op, "hidden_states", hidden_states, "B, 1, d_model")
        if hidden_states.shape[1] != 1:
            raise ValueError(
                f"{op}: hidden_states must have one token, got "
                f"hidden_states.shape={tuple(hidden_states.shape)}"
            )
        return self._after(hidden_states, (conv_state, ssm_state)), conv_state, ssm_state

    def _after(self, x: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
        """Computes forward after the tokens in `states` and updates them."""
        conv, matrix = states
        state = RecurrentState(**{self._name: matrix, "conv": conv[..., 1:]})
        y: Tensor = super().forward(x, state=state)  # type: ignore[misc]
        return y

    def _forward(self, x: Tensor, inference_params: Any) -> Tensor:
        if inference_params is None:
            y: Tensor = super().forward(x)  # type: ignore[misc]
            return y
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(len(x), 0)
        if inference_params.seqlen_offset == 0:
            for t in states[self.layer_idx]:
                t.zero_()
        return self._after(x, states[self.layer_idx])


def _require(op: str, given: dict[str, Any], **known: Any) -> None:
    for name, value in known.items():
        if given[name] != value:
            raise NotImplementedError(
                f"{op}: {name} must be {value!r}, got {name}={shown(given[name])}"
            )


class Mamba(_Steps, modules.Mamba):
    """Computes :class:`omniattn.modules.Mamba`, with mamba-ssm's arguments and states.

    Args:
        d_model: width of the tokens.
        d_state, d_conv, expand, dt_min, dt_max, dt_init, dt_scale, dt_init_floor: see there.
        dt_rank: width of the steps, "auto" for d_model / 16.
        conv_bias, bias: see there.
        use_fast_path: has no effect.
        layer_idx: key of the layer's states in `inference_params`.
        device, dtype: of the parameters.
    """

    _name = "ssm"

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(dt_rank, str) and dt_rank != "auto":
            raise ValueError(f'Mamba: dt_rank must be an int or "auto", got dt_rank={dt_rank!r}')
        config = modules.Mamba.Config(
            d_model,
            d_state,
            d_conv,
            expand,
            dt_rank=None if isinstance(dt_rank, str) else dt_rank,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init=dt_init,
            dt_scale=dt_scale,
            dt_init_floor=dt_init_floor,
            conv_bias=conv_bias,
            bias=bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.use_fast_path, self.activation = layer_idx, use_fast_path, "silu"
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner, self.dt_rank = self.dt_proj.weight.shape

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, inference_params: Any = None
    ) -> Tensor:
        """Maps hidden_states (B, T, d_model) to the same shape.

        `inference_params` has seqlen_offset, the number of earlier tokens, and
        key_value_memory_dict, where states are stored.
        """
        require_real("Mamba", hidden_states=hidden_states)
        return self._forward(hidden_states, inference_params)


class Mamba2(_Steps, modules.Mamba2):
    """Computes :class:`omniattn.modules.Mamba2`, with mamba-ssm's arguments and states.

    Args:
        d_model: width of u.
        d_state, d_conv, expand, headdim, ngroups, dt_limit, bias, conv_bias: see there.
        conv_init, d_ssm, D_has_hdim, rmsnorm, norm_before_gate: must be mamba-ssm's defaults.
        A_init_range, dt_min, dt_max, dt_init_floor, process_group: must be the defaults, too.
        chunk_size, use_mem_eff_path, sequence_parallel: have no effect.
        layer_idx: key of the layer's states in `inference_params`.
        device, dtype: of the parameters.
    """

    _name = "s"

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = locals() | {"A_init_range": tuple(A_init_range)}
        given["d_ssm"] = None if d_ssm == expand * d_model else d_ssm
        _require(
            "Mamba2", given, conv_init=None, d_ssm=None, A_init_range=(1, 16), D_has_hdim=False,
            rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4,
            process_group=None,
        )  # fmt: skip
        config = modules.Mamba2.Config(
            d_model, d_state, d_conv, expand, headdim, ngroups, dt_limit, bias, conv_bias
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.chunk_size, self.activation = layer_idx, chunk_size, "silu"
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.headdim, self.ngroups, self.dt_limit = headdim, ngroups, dt_limit
        self.d_inner = self.d_ssm = expand * d_model
        self.nheads = self.d_inner // headdim

    def forward(  # type: ignore[override]
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Maps u (B, T, d_model), or with `seqlen` (B seqlen, d_model), to the same shape.

        With `cu_seqlens` B is 1. `seq_idx` must be None. `inference_params`: see :class:`Mamba`.
        """
        require_real("Mamba2", u=u)
        if seq_idx is not None:
            raise NotImplementedError(
                f"Mamba2: seq_idx must be None, use cu_seqlens instead, got {shown(seq_idx)}"
            )
        if seqlen is not None:
            return self.forward(
                u.unflatten(0, (-1, seqlen)),
                cu_seqlens=cu_seqlens,
                inference_params=inference_params,
            ).flatten(0, 1)
        if cu_seqlens is None:
            return self._forward(u, inference_params)
        if inference_params is not None:
            raise NotImplementedError(
                f"Mamba2: cu_seqlens must be None with inference_params, got {shown(cu_seqlens)}"
            )
        nested = torch.nested.nested_tensor_from_jagged(u[0], cu_seqlens.long())
        return self._forward(nested, None).values()[None]


class GatedMLP(nn.Module):
    """Computes ``fc2(y activation(gate))`` with y and the gate from fc1.

    The inner width, 8/3 of in_features by default, is rounded up to a multiple of `multiple_of`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = nnf.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_int("GatedMLP", "multiple_of", multiple_of, 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = int(8 * in_features / 3) if hidden_features is None else hidden_features
        inner = -(-inner // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, 2 * inner, bias=bias, **factory)
        self.activation = activation
        self.fc2 = nn.Linear(inner, out, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        require_real("GatedMLP", x=x)
        y, gate = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(y * self.activation(gate))
        return out


class Block(nn.Module):
    """Computes a mixer, and an MLP if there is one, each of the norm of a residual.

    Args:
        dim: width.
        mixer_cls, mlp_cls, norm_cls: called with dim; nn.Identity for no MLP.
        fused_add_norm: True to compute sums and norms together, in the dtype of the hidden states;
            norms must be nn.LayerNorm or mamba-ssm's RMSNorm.
        residual_in_fp32: True for residuals in fp32.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm, self.mixer = norm_cls(dim), mixer_cls(dim)
        self.mlp: nn.Module | None = None
        if mlp_cls is not nn.Identity:
            self.norm2, self.mlp = norm_cls(dim), mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, (nn.LayerNorm, RMSNorm)):
            raise ValueError(
                "Block: norm_cls must be LayerNorm or RMSNorm with fused_add_norm, "
                f"got {type(self.norm).__name__}"
            )

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: Any = None,
        **mixer_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output of the last layer, and the residual to which it is to be added."""
        x, residual = self._normed(self.norm, hidden_states, residual)
        x = self.mixer(x, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            x, residual = self._normed(self.norm2, x, residual)
            x = self.mlp(x)
        return x, residual

    def _normed(self, norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        weight: Any = norm.weight
        if not self.fused_add_norm:
            total = x if residual is None else x + residual
            normed: Tensor = norm(total.to(weight.dtype))
            return normed, total.float() if self.residual_in_fp32 else total
        bias, eps = getattr(norm, "bias", None), getattr(norm, "eps", 1e-5)
        found = layer_norm_fn(
            *(x, weight, bias, residual),
            eps=eps,
            prenorm=True,
            residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=isinstance(norm, RMSNorm),
        )
        assert isinstance(found, tuple)
        return found[0], found[1]

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Returns the states of the mixer."""
        mixer: Any = self.mixer
        return mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
