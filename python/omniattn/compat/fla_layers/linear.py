"""Linear attention of `fla.layers` and its feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice
from omniattn.compat._fla_linear import chunk_linear_attn
from omniattn.compat._fla_norms import RMSNorm
from omniattn.compat.fla_layers.base import (
    Layer,
    Result,
    get_layer_cache,
    update_layer_cache,
)


class HedgehogFeatureMap(nn.Module):
    """Softmax of a linear map and of its negative (Zhang et al. 2024, arXiv:2402.04347)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], -1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """ReLU of a linear map (Kasai et al. 2021, arXiv:2103.13076)."""

    def __init__(
        self, head_dim: int, dot_dim: int | None = None, bias: bool | None = False
    ) -> None:
        super().__init__()
        self.head_dim, self.dot_dim, self.bias = head_dim, dot_dim or head_dim, bias
        self.layer = nn.Linear(head_dim, self.dot_dim, bias=bool(bias))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).relu()
        return y


class DPFPFeatureMap(nn.Module):
    """Products of a vector with its rotations (Schlag et al. 2021, arXiv:2102.11174)."""

    def __init__(self, head_dim: int, nu: int = 4) -> None:
        super().__init__()
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x.relu(), -x.relu()], -1)
        rolled = torch.cat([both.roll(n, -1) for n in range(1, self.nu + 1)], -1)
        return torch.cat([both] * self.nu, -1) * rolled


class HadamardFeatureMap(nn.Module):
    """Product of two linear maps."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer1(x) * self.layer2(x)
        return y


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
