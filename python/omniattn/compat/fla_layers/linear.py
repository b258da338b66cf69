"""Linear attention of `fla.layers`, and that of Based and ReBased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice
from omniattn.compat._fla.heads import parallel_based, parallel_rebased
from omniattn.compat._fla.linear import chunk_linear_attn
from omniattn.compat._fla.norms import RMSNorm
from omniattn.compat.fla_layers.base import (
    Layer,
    Result,
    get_layer_cache,
    update_layer_cache,
)
from omniattn.compat.fla_layers.feature_maps import (
    DPFPFeatureMap,
    HadamardFeatureMap,
    HedgehogFeatureMap,
    RebasedFeatureMap,
    T2RFeatureMap,
    TaylorFeatureMap,
)

#: Feature maps with parameters, or with a width that differs from that of a head.
_LEARNED: dict[str, Callable[[int], nn.Module]] = {
    "hedgehog": HedgehogFeatureMap,
    "t2r": T2RFeatureMap,
    "elementwise_product": HadamardFeatureMap,
    "dpfp": DPFPFeatureMap,
}
_FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: nnf.elu(x) + 1,
    "relu": nnf.relu,
    "identity": lambda x: x,
}


class LinearAttention(Layer):
    """Linear attention, see :func:`functional.linear_attention`.

    Args:
        mode: "chunk", "fused_chunk" or "fused_recurrent"; has no effect.
        hidden_size: width of x and y.
        expand_k, expand_v: widths of all keys and values, as multiples of hidden_size.
        num_heads, num_kv_heads: number of heads of queries, and of keys and values.
        feature_map: "hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu" or "identity".
        tie_feature_map_qk: True for one learned map of queries and keys.
        output_norm: "rmsnorm" or "identity".
        norm_q, norm_k: True to divide features by their sum.
        do_feature_map_norm: True to divide by the sum of the weights.
        elementwise_affine, norm_eps: norm of the outputs.
        layer_idx: number of the layer, for a cache.
    """

    modes = ("chunk", "fused_chunk", "fused_recurrent")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str = "elementwise_product",
        tie_feature_map_qk: bool = False,
        output_norm: str = "rmsnorm",
        norm_q: bool = False,
        norm_k: bool = False,
        do_feature_map_norm: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        op = "LinearAttention"
        self._start(mode, layer_idx)
        self._sizes(hidden_size, expand_k, expand_v, num_heads)
        self._group(num_kv_heads)
        require_choice(op, "feature_map", feature_map, (*_LEARNED, *_FIXED))
        require_choice(op, "output_norm", output_norm, ("rmsnorm", "identity"))
        self.do_feature_map_norm, self.norm_q, self.norm_k = do_feature_map_norm, norm_q, norm_k
        if feature_map in _LEARNED:
            create = _LEARNED[feature_map]
            first = create(self.head_k_dim)
            second = first if tie_feature_map_qk else create(self.head_k_dim)
            self.feature_map_q: Callable[[Tensor], Tensor] = first
            self.feature_map_k: Callable[[Tensor], Tensor] = second
        else:
            self.feature_map_q = self.feature_map_k = _FIXED[feature_map]
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim_per_group, bias=False)
        self.norm: nn.Module = nn.Identity()
        if output_norm == "rmsnorm":
            affine = bool(elementwise_affine)
            self.norm = RMSNorm(self.head_v_dim, affine, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Result:
        """Returns y, None and the cache; padding gives values of 0, as in fla."""
        _, tokens = self._checked(hidden_states, attention_mask)
        state = get_layer_cache(self, past_key_values)
        x = hidden_states
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if attention_mask is not None:
            v = v * attention_mask[:, -tokens:, None].to(v.dtype)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        k, v = (t.repeat_interleave(self.num_kv_groups, -2) for t in (k, v))
        q, k = self.feature_map_q(q), self.feature_map_k(k)
        q = q / (q.sum(-1, True) + 1e-4) if self.norm_q else q
        k = k / (k.sum(-1, True) + 1e-4) if self.norm_k else k
        o, recurrent = chunk_linear_attn(
            q, k, v,
            initial_state=None if state is None else state["recurrent_state"],
            output_final_state=bool(use_cache), normalize=self.do_feature_map_norm,
        )  # fmt: skip
        update_layer_cache(self, past_key_values, recurrent_state=recurrent, offset=tokens)
        return self.o_proj(self.norm(o).flatten(-2)), None, past_key_values


class _Kernel(Layer):
    """Base class of layers with features of few channels, without a cache."""

    modes = ("parallel", "chunk", "fused_chunk")

    def _project(
        self, hidden_size: int, feature_dim: int, num_heads: int, num_key_value_heads: int
    ) -> None:
        op = type(self).__name__
        if num_heads != num_key_value_heads or hidden_size % num_heads:
            raise ValueError(
                f"{op}: num_heads must be num_key_value_heads and divide hidden_size, got "
                f"{num_heads=}, {num_key_value_heads=}, {hidden_size=}"
            )
        self.hidden_size, self.feature_dim, self.num_heads = hidden_size, feature_dim, num_heads
        self.num_key_value_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, feature_dim * num_heads, bias=False)
        self.k_proj = nn.Linear(hidden_size, feature_dim * num_heads, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k (B, T, H, feature_dim) and v (B, T, H, head_dim)."""
        self._checked(hidden_states, None)
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(hidden_states).unflatten(-1, (self.num_heads, -1)) for layer in layers)
        return q, k, v


class BasedLinearAttention(_Kernel):
    """Based: weights ``1 + u + u^2 / 2``, divided by their sum, see `parallel_based`.

    Args:
        hidden_size: width of x and y.
        feature_dim: width of a head of q and k. fla takes hidden_size / num_heads instead, so that
            only this width works there.
        num_key_value_heads, num_heads: number of heads, the same.
        feature_name, eps, causal: have no effect, as in fla.
        mode: "parallel" for ``u = q . k``, "chunk" or "fused_chunk" for it over sqrt(feature_dim).
    """

    def __init__(
        self,
        hidden_size: int,
        feature_dim: int = 16,
        num_key_value_heads: int = 12,
        num_heads: int = 12,
        feature_name: str = "taylor_exp",
        eps: float = 1e-12,
        causal: bool = True,
        mode: str = "parallel",
    ) -> None:
        super().__init__()
        self._start(mode, None)
        self._project(hidden_size, feature_dim, num_heads, num_key_value_heads)
        self.feature_name, self.eps, self.causal = feature_name, eps, causal
        self.feature_map = TaylorFeatureMap(feature_dim)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Returns y; keywords have no effect, as in fla."""
        scale = 1.0 if self.mode == "parallel" else None
        y: Tensor = self.o_proj(parallel_based(*self._heads(hidden_states), scale).flatten(-2))
        return y


class ReBasedLinearAttention(_Kernel):
    """ReBased: weights ``u^2`` of normed q and k, divided by their sum, see `parallel_rebased`.

    Args:
        hidden_size: width of x and y.
        l_max, causal: have no effect, as in fla.
        feature_dim: width of a head of q and k.
        num_key_value_heads, num_heads: number of heads, the same.
        use_gamma, use_beta, normalize: factors, offsets and the norm of q and k.
        eps: added to the sum of the weights; with other modes than "parallel" 1e-10 is.
        mode: "parallel", "chunk" or "fused_chunk".
        layer_idx: number of the layer.
    """

    def __init__(
        self,
        hidden_size: int,
        l_max: int = 2048,
        feature_dim: int = 16,
        num_key_value_heads: int = 16,
        num_heads: int = 16,
        use_gamma: bool | None = True,
        use_beta: bool | None = True,
        normalize: bool | None = True,
        causal: bool = True,
        eps: float = 1e-5,
        mode: str = "parallel",
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self._start(mode, layer_idx)
        self._project(hidden_size, feature_dim, num_heads, num_key_value_heads)
        self.l_max, self.causal, self.eps = l_max, causal, eps
        self.feature_map = RebasedFeatureMap(feature_dim, use_gamma, use_beta, normalize)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Returns y; keywords have no effect, as in fla."""
        q, k, v = self._heads(hidden_states)
        q, k = self.feature_map(q, flatten=False), self.feature_map(k, flatten=False)
        o = parallel_rebased(q, k, v, self.eps if self.mode == "parallel" else 1e-10)
        assert isinstance(o, Tensor)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y
