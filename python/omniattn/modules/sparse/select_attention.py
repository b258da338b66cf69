"""Hard attention: each query reads one key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_bool, require_choice, require_number
from omniattn.modules.base.fields import Backend, Signed
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.heads import HeadsConfig
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.sparse.sparse_attention import SparseAttention


class SelectAttention(SparseAttention):
    """Attention in which each query reads the value of the key with the lowest energy.

    ``y = W_o v_j*`` with ``j* = argmin_j E(q, k_j)``, see `functional.select_attention`. The
    parameters are those of Attention, so that either layer loads the other's weights.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        No paper; gradients: Bengio et al., Estimating or Propagating Gradients Through Stochastic
        Neurons, 2013, arXiv 1308.3432.

    Example:
        >>> SelectAttention(dim=16, num_heads=4)(torch.ones(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    @dataclass(frozen=True)
    class Config(HeadsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            num_heads: number of query heads.
            num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
            head_dim: width of a head, default dim / num_heads.
            bias, out_bias: True for biases of q_proj, k_proj and v_proj; of o_proj.
            energy, tau, ste, scale: as in `functional.select_attention`.
            theta: maximum energy of a selected key; None for no limit.
            causal: True if a token reads itself and earlier tokens only.
            rope_interleaved, init_std, out_init_std, backend: as in Attention.
        """

        bias: bool = False
        out_bias: bool = False
        energy: str = "l2"
        theta: Signed | None = None
        tau: float = 1.0
        ste: bool = True
        scale: Signed | None = None
        causal: bool = True
        rope_interleaved: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "SelectAttention"
            require_choice(op, "energy", self.energy, ("l2", "dot"))
            require_number(op, "tau", self.tau, above=0)
            require_bool(op, "ste", self.ste)

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
        self.config = config
        self._build(device, dtype)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: object) -> Tensor:
        c = self.config
        q, k, v = tensors
        return functional.select_attention(
            *(q, k, v),
            energy="l2" if c.energy == "l2" else "dot",
            theta=math.inf if c.theta is None else c.theta,
            tau=c.tau,
            ste=c.ste,
            scale=c.scale,
            causal=c.causal,
            backend=c.backend,
        )
