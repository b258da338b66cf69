"""The experts of a mixture: their weights, stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional.routing import Routing
from omniattn.modules.layer import Float32Buffers
from omniattn.ops.moe import ACTIVATIONS

if TYPE_CHECKING:
    from omniattn.modules.moe import MoE


class DefaultVectors(Float32Buffers):
    """Experts with what router_grad="default_vector" learns: a vector for each that stands for its
    output where it is not chosen."""

    config: MoE.Config
    default_vectors: Tensor | None
    #: Where the last forward in training moves those of :attr:`own`.
    moved_vectors: Tensor | None = None
    own = slice(None)

    def reach_others(self, y: Tensor, routing: Routing, outputs: Tensor, index: Tensor) -> Tensor:
        """y with the gradient of the experts that were not chosen; remembers where the `outputs`
        (..., dim) of own experts `index` (...) move their vectors, which happens in training only.
        """
        if self.default_vectors is None or not self.training:
            return y
        # They stay until after the backward, where checkpointing repeats the forward.
        moved = self.default_vectors[self.own].clone()
        decay, scale = self.config.default_decay, self.config.route_scale
        functional.update_default_vectors(moved, outputs, index, decay=decay)
        self.moved_vectors = moved
        return functional.default_vector_gradient(y, routing, self.default_vectors, scale=scale)

    @torch.no_grad()
    def update_default_vectors(self) -> None:
        """See :meth:`MoE.update_default_vectors`; all ranks call it."""
        if self.default_vectors is None or self.moved_vectors is None:
            raise RuntimeError(
                "MoE: update_default_vectors needs router_grad='default_vector' and a forward in "
                "training before it"
            )
        self.gather(self.default_vectors, self.moved_vectors)

    def gather(self, vectors: Tensor, own: Tensor) -> None:
        """Writes those of all experts into `vectors`."""
        vectors.copy_(own)


class Experts(DefaultVectors):
    """The stacked weights of all experts.

    Shape:
        x (..., dim), Routing of (..., k) -> (..., dim). router_grad="default_vector" has a buffer
        default_vectors (E, dim).
    """

    def __init__(
        self,
        config: MoE.Config,
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
        learns = c.router_grad == "default_vector"
        self.register_buffer("default_vectors", vectors if learns else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, zero biases and default vectors."""
        nn.init.normal_(self.gate_up_proj, std=self.config.init_std)
        nn.init.normal_(self.down_proj, std=self.config.out_init_std)
        for zeros in (self.gate_up_proj_bias, self.down_proj_bias, self.default_vectors):
            if zeros is not None:
                nn.init.zeros_(zeros)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of the chosen experts."""
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
            weigh_inputs=c.router == "llama4",
            # Of E slots a token most are empty when experts choose; keeping would count them all.
            recompute=c.recompute or c.router == "expert_choice",
            backend=c.backend,
        )
