"""DeltaFormer's attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from omniattn import functional
from omniattn.functional.masks import Mask
from omniattn.modules.base.fields import Backend, Epsilon
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm
from omniattn.modules.base.state import State, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.sparse.sparse_attention import SparseAttention


class DeltaFormerAttention(SparseAttention):
    """Causal attention to values from which their own reading of earlier values is subtracted.

    ``y = W_o deltaformer_attention(q, k, v, beta)`` with ``beta = W_b x + b_b``, see
    `functional.deltaformer_attention`. A cache stores the corrected values in place of v.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, b_proj, o_proj, and with qk_norm q_norm and k_norm: names
        and shapes as in fla.

    Reference:
        Zhong et al., Understanding Transformer from the Perspective of Associative Memory, 2025,
        arXiv 2505.19488.

    Example:
        >>> DeltaFormerAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of heads.
            num_kv_heads: must be num_heads, the default.
            head_dim: width of a head, default dim / num_heads.
            bias: True for biases of q_proj, k_proj and v_proj.
            qk_norm: True for an RMS norm of each head of q and k.
            norm_eps: eps of these norms.
            rope_interleaved, init_std, out_init_std, backend: as in Attention.
        """

        out_bias: ClassVar[bool] = False

        bias: bool = False
        qk_norm: bool = False
        norm_eps: Epsilon = 1e-5
        rope_interleaved: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.kv_heads != self.num_heads:
                raise ValueError(
                    "DeltaFormerAttention: num_kv_heads must be num_heads, "
                    f"got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
                )

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self._build(device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        beta = Linear.Config(c.dim, c.num_heads, True, c.init_std, c.backend)
        self.b_proj = Linear(beta, **factory)
        if c.qk_norm:
            norm = RMSNorm.Config(c.head_size, c.norm_eps, backend=c.backend)
            self.q_norm, self.k_norm = norm.build(**factory), norm.build(**factory)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: new tokens. For a jagged nested tensor the result is jagged, and each sequence
                attends only to itself.
            state: from `new_state`, to which the keys and corrected values are appended.
            rope: (cos, sin) at the positions of x (of x.values() if nested).
            mask: must be None.
        """
        if mask is not None:
            raise ValueError("DeltaFormerAttention: mask must be None, got a mask")
        return self._run(x, state, rope, mask)

    def _cache_of(self, state: State | None) -> Any:
        return new.require_corrections("DeltaFormerAttention", state)

    def _rotated(self, q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return super()._rotated(q, k, *given)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        (q, k, v), cache, steps = tensors, given["cache"], x.shape[1]
        past = None if cache is None else v[:, : v.shape[1] - steps]
        out, u = functional.deltaformer_attention(
            q,
            k,
            v[:, v.shape[1] - steps :],
            self.b_proj(x),
            past=past,
            backend=self.config.backend,
        )
        if cache is not None:
            cache.correct(u)
        return out
