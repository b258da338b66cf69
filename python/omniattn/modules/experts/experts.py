"""Experts of a mixture, with stacked weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_number, require_tensor, shown
from omniattn.functional.layers.moe import ACTIVATIONS
from omniattn.functional.routing import Routing
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Float32Buffers, Layer, LayerConfig, config_or_fields
from omniattn.modules.base.mlp import check_clamp


class DefaultVectors(Float32Buffers):
    """Experts with the default vectors of router_grad="default_vector".

    Each expert has one vector, which replaces its output for tokens that do not choose it.
    """

    config: Experts.Config
    default_vectors: Tensor | None
    #: Updated vectors of the experts :attr:`own` after the last forward in training.
    moved_vectors: Tensor | None = None
    own = slice(None)

    def reach_others(self, y: Tensor, routing: Routing, outputs: Tensor, index: Tensor) -> Tensor:
        """Adds the router gradient of experts that were not chosen to y; in training only.

        Also computes the updated vectors from the `outputs` (..., dim) of own experts `index` (...)
        and stores them in `moved_vectors`.
        """
        if self.default_vectors is None or not self.training:
            return y
        # The vectors must not change before the backward, in which checkpointing may recompute the
        # forward.
        moved = self.default_vectors[self.own].clone()
        decay, scale = self.config.default_decay, self.config.route_scale
        functional.update_default_vectors(moved, outputs, index, decay=decay)
        self.moved_vectors = moved
        return functional.default_vector_gradient(y, routing, self.default_vectors, scale=scale)

    @torch.no_grad()
    def update_default_vectors(self) -> None:
        """See :meth:`MoE.update_default_vectors`; all ranks must call it."""
        if self.default_vectors is None or self.moved_vectors is None:
            raise RuntimeError(
                "MoE: update_default_vectors needs router_grad='default_vector' and a forward in "
                "training before it"
            )
        self.gather(self.default_vectors, self.moved_vectors)

    def gather(self, vectors: Tensor, own: Tensor) -> None:
        """Writes the vectors of all experts into `vectors`."""
        vectors.copy_(own)


class Experts(DefaultVectors, Layer):
    """Computes the weighted sum of the chosen experts; the weights of all experts are stacked.

    Shape:
        x (..., dim), Routing of (..., k) -> (..., dim). Parameters gate_up_proj (E, 2 hidden_dim,
        dim), or (E, hidden_dim, dim) if the activation has no gate, down_proj (E, dim, hidden_dim),
        and with biases gate_up_proj_bias and down_proj_bias; buffer default_vectors (E, dim).

    Example:
        >>> from omniattn.modules import Router
        >>> x = torch.ones(1, 3, 8)
        >>> _, routing, _ = Router(8, experts=4, top_k=2)(x)
        >>> Experts(8, 16, experts=4)(x, routing).shape
        torch.Size([1, 3, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, hidden_dim, experts: width of a token, inner width and number of experts.
            activation: one of those of `omniattn.functional.moe_experts`.
            bias: True to add biases to both projections.
            clamp: (alpha, limit) of clamped_swiglu.
            weigh_inputs: True if weights multiply the experts' inputs (Llama 4), not their outputs.
            default_vectors: True to learn default vectors, for router_grad="default_vector".
            default_decay: decay of the default vectors' running means.
            route_scale: the router's scale, for the gradient of the default vectors.
            recompute: True to save no tensor of the hidden size for the backward pass.
            init_std, out_init_std: standard deviations of gate_up_proj and down_proj.
        """

        dim: Size
        hidden_dim: Size
        experts: Size
        activation: str = "swiglu"
        bias: bool = False
        clamp: tuple[float, float] = (1.702, 7.0)
        weigh_inputs: bool = False
        default_vectors: bool = False
        default_decay: float = 0.9
        route_scale: float = 1.0
        recompute: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.activation not in ACTIVATIONS:
                raise ValueError(
                    f"Experts: activation must be one of {', '.join(ACTIVATIONS)}, "
                    f"got activation={shown(self.activation)}"
                )
            check_clamp("Experts", self.clamp)
            require_number("Experts", "default_decay", self.default_decay, 0, 1)

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
        columns = c.hidden_dim * (1 + ACTIVATIONS[c.activation][1])

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(c.experts, columns, c.dim)
        self.down_proj = parameter(c.experts, c.dim, c.hidden_dim)
        self.gate_up_proj_bias = parameter(c.experts, columns) if c.bias else None
        self.down_proj_bias = parameter(c.experts, c.dim) if c.bias else None
        vectors = torch.empty(c.experts, c.dim, device=device, dtype=torch.float32)
        self.register_buffer("default_vectors", vectors if c.default_vectors else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal weights; zeroes biases and default vectors."""
        nn.init.normal_(self.gate_up_proj, std=self.config.init_std)
        nn.init.normal_(self.down_proj, std=self.config.out_init_std)
        for zeros in (self.gate_up_proj_bias, self.down_proj_bias, self.default_vectors):
            if zeros is not None:
                nn.init.zeros_(zeros)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Computes the weighted sum of the chosen experts."""
        require_tensor("Experts", "x", x)
        if self.default_vectors is None or not self.training:
            return self._run(x, routing.experts, routing.weights)
        slots = x[..., None, :].expand(*routing.experts.shape, x.shape[-1])
        index = routing.experts[..., None]
        outputs = self._run(slots, index, torch.ones_like(index, dtype=routing.weights.dtype))
        y = (outputs * routing.weights[..., None]).sum(-2).to(outputs.dtype)
        return self.reach_others(y, routing, outputs, routing.experts)

    def _run(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        c = self.config
        return functional.moe_experts(
            x,
            experts,
            weights,
            self.gate_up_proj,
            self.down_proj,
            up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            activation=c.activation,
            alpha=c.clamp[0],
            limit=c.clamp[1],
            weigh_inputs=c.weigh_inputs,
            recompute=c.recompute,
            backend=c.backend,
        )
