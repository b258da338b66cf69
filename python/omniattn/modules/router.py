"""Routers of mixtures of experts: their weights, and which function makes the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional._checks import autocast_dtype
from omniattn.functional.routing import Routing
from omniattn.modules.layer import Float32Buffers
from omniattn.reference.philox import new_seed

if TYPE_CHECKING:
    from omniattn.modules.moe import MoE

ROUTERS = ("softmax", "sigmoid", "llama4", "noisy", "expert_choice")


class Router(Float32Buffers):
    """Logits x W^T (+ b) in fp32 and what `config.router` makes of them.

    Shape:
        x (..., T, dim) -> logits (..., T, E), Routing, and of the noisy router the load (E,).
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        config: MoE.Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        noisy = c.router == "noisy"
        empty = torch.empty(c.experts, c.dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)
        self.noise_weight = nn.Parameter(torch.empty_like(empty)) if noisy else None
        self.bias = (
            nn.Parameter(torch.empty(c.experts, device=device, dtype=dtype))
            if c.router_bias
            else None
        )
        correction = torch.empty(c.experts, device=device, dtype=torch.float32)
        steered = c.router == "sigmoid"
        self.register_buffer("e_score_correction_bias", correction if steered else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, zero ones for the noisy router, as its paper has it; zero biases."""
        if self.noise_weight is not None:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.noise_weight)
        else:
            nn.init.normal_(self.weight, std=self.config.init_std)
        for bias in (self.bias, self.e_score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Routing, Tensor | None]:
        """x (..., T, dim) -> logits (..., T, E), the routing, the load of the noisy router;
        token_mask (..., T) hides tokens from that load and from experts that choose theirs."""
        c = self.config
        if self.training and c.jitter:
            x = functional.router_jitter(x, c.jitter, new_seed())
        logits = self._product(x, self.weight)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        load = None
        if c.router == "sigmoid":
            routing = functional.sigmoid_top_k(
                logits,
                c.top_k,
                bias=self.e_score_correction_bias,
                renormalize=c.renormalize,
                scale=c.route_scale,
                groups=c.groups,
                top_groups=c.top_groups,
            )
        elif c.router == "llama4":
            routing = functional.llama4_top_k(logits, c.top_k)
        elif c.router == "noisy":
            assert self.noise_weight is not None
            seed = new_seed() if self.training else None
            noise = self._product(x, self.noise_weight)
            routing, load = functional.noisy_top_k(
                logits, noise, c.top_k, seed=seed, noise_eps=c.noise_eps, token_mask=token_mask
            )
        elif c.router == "expert_choice":
            assert c.capacity_factor is not None
            tokens = logits.shape[-2] if token_mask is None else token_mask.sum(-1)
            capacity = functional.expert_capacity(tokens, c.experts, 1, c.capacity_factor)
            routing = functional.expert_choice(logits, capacity, token_mask=token_mask)
        else:
            routing = functional.softmax_top_k(
                logits,
                c.top_k,
                renormalize=c.renormalize,
                scale=c.route_scale,
                groups=c.groups,
                top_groups=c.top_groups,
                router_grad=c.router_grad,
            )
        return logits, routing, load

    @staticmethod
    def _product(x: Tensor, weight: Tensor) -> Tensor:
        """In fp32 (fp64 for fp64), under autocast too."""
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, weight = x.to(compute), weight.to(compute)
        if autocast_dtype(x) is None:
            return nn.functional.linear(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, weight)
