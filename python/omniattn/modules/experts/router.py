"""Routers of mixtures of experts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import (
    autocast_dtype,
    new_seed,
    require_int,
    require_number,
    require_tensor,
    shown,
)
from omniattn.functional.routing import ROUTER_GRADS, Routing
from omniattn.functional.routing.routers import check_groups
from omniattn.modules.base.fields import Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import Float32Buffers, Layer, LayerConfig, config_or_fields

ROUTERS = ("softmax", "sigmoid", "llama4", "noisy", "expert_choice")


class Router(Float32Buffers, Layer):
    """Computes logits x W^T (+ b) in fp32, and the routing by `config.router`.

    Shape:
        x (..., T, dim) -> logits (..., T, E), Routing, and the noisy router's load (E,), else None.
        Parameters weight (E, dim), bias (E,), noise_weight (E, dim); buffer e_score_correction_bias
        (E,) of the sigmoid router.

    Example:
        >>> logits, routing, _ = Router(8, experts=4, top_k=2)(torch.ones(1, 3, 8))
        >>> logits.shape, routing.experts.shape
        (torch.Size([1, 3, 4]), torch.Size([1, 3, 2]))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim, experts: width of a token, number of experts.
            top_k: number of experts per token.
            router: softmax, sigmoid, llama4 (weights multiply the experts' inputs), noisy, or
                expert_choice, which requires `capacity_factor` and ignores `top_k`.
            router_bias: True to add a bias to the logits.
            renormalize, route_scale, groups, top_groups, router_grad, jitter, noise_eps: see
                omniattn.functional.routing.
            capacity_factor, capacity: capacity of an expert, as a multiple of an even share or in
                tokens; without either, no assignments are dropped.
            capacity_per_sequence: True for a capacity per sequence, as in transformers' Switch,
                instead of per batch.
            capacity_by_score: True to keep the most probable tokens (V-MoE), not the earliest.
            capacity_at_eval: True to apply the capacity in inference too.
            bias_rate: default rate of `MoE.update_bias`.
            init_std: standard deviation of the initial weight.
        """

        dim: Size
        experts: Size
        top_k: Size
        router: str = "softmax"
        router_bias: bool = False
        renormalize: bool = True
        route_scale: float = 1.0
        groups: Size = 1
        top_groups: Size = 1
        router_grad: str = "exact"
        jitter: float = 0.0
        noise_eps: Epsilon = 0.0
        capacity_factor: float | None = None
        capacity: int | None = None
        capacity_per_sequence: bool = False
        capacity_by_score: bool = False
        capacity_at_eval: bool = False
        bias_rate: float = 1e-3
        init_std: float = 0.02

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, allowed in (("router", ROUTERS), ("router_grad", ROUTER_GRADS)):
                if getattr(self, name) not in allowed:
                    raise ValueError(
                        f"Router: {name} must be one of {', '.join(allowed)}, "
                        f"got {name}={getattr(self, name)!r}"
                    )
            require_int("Router", "top_k", self.top_k, 1, self.experts)
            require_number("Router", "jitter", self.jitter, 0, below=1)
            check_groups("Router", self.experts, self.groups, self.top_groups, self.top_k)
            self._check_router()
            self._check_capacity()
            if self.top_k == 1 and self.renormalize and self.router == "softmax":
                warnings.warn(
                    "Router: top_k=1 with renormalize=True gives weight 1 to every token: its "
                    "router learns from the balance loss alone",
                    stacklevel=3,
                )

        def _check_router(self) -> None:
            """Rejects options that the router does not support."""
            scored = ("softmax", "sigmoid")
            for name, plain, routers in (
                ("router_grad", "exact", ("softmax",)),
                ("route_scale", 1.0, scored),
                ("top_groups", self.groups, scored),
                ("noise_eps", 0.0, ("noisy",)),
            ):
                if getattr(self, name) != plain and self.router not in routers:
                    raise ValueError(
                        f"Router: {name} must be {plain!r} unless router is "
                        f"{' or '.join(map(repr, routers))}, "
                        f"got {name}={getattr(self, name)!r}, router={shown(self.router)}"
                    )

        def _check_capacity(self) -> None:
            room = f"capacity={self.capacity}, capacity_factor={self.capacity_factor}"
            if self.router == "expert_choice" and self.capacity_factor is None:
                raise ValueError(
                    f"Router: router='expert_choice' needs a capacity_factor, got {room}"
                )
            if self.capacity is not None and self.capacity_factor is not None:
                raise ValueError(
                    f"Router: capacity and capacity_factor must not both be given, got {room}"
                )
            if self.router_grad == "ste_dense" and self.limited:
                raise ValueError(
                    "Router: router_grad='ste_dense' evaluates every expert: capacity and "
                    f"capacity_factor must be None, got {room}"
                )
            for name in ("capacity_per_sequence", "capacity_by_score", "capacity_at_eval"):
                if getattr(self, name) and not self.limited:
                    raise ValueError(
                        f"Router: {name} needs capacity or capacity_factor, got {room}"
                    )

        @property
        def limited(self) -> bool:
            """True if experts have a capacity."""
            return self.capacity is not None or self.capacity_factor is not None

    e_score_correction_bias: Tensor | None

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
        """Draws normal weights, or zeros for the noisy router as in its paper; zeroes biases."""
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
        """Maps x (..., T, dim) to logits (..., T, E), the routing, and the noisy router's load.

        token_mask (..., T) excludes padding from the load and from expert choice.
        """
        c = self.config
        require_tensor("Router", "x", x)
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

    def drop(self, routing: Routing, token_mask: Tensor | None = None) -> tuple[Routing, Tensor]:
        """Returns the routing without assignments over capacity, and their number."""
        c = self.config
        groups = routing
        if not c.capacity_per_sequence:
            groups = Routing(*(t.flatten(0, -2) for t in routing))
            token_mask = None if token_mask is None else token_mask.flatten()
        capacity: int | Tensor | None = c.capacity
        if c.capacity_factor is not None:
            tokens = groups.experts.shape[-2] if token_mask is None else token_mask.sum(-1)
            capacity = functional.expert_capacity(tokens, c.experts, c.top_k, c.capacity_factor)
        assert capacity is not None
        priority = groups.scores.amax(-1) if c.capacity_by_score else None
        kept, dropped = functional.drop_over_capacity(groups, capacity, priority=priority)
        return Routing(*(t.view(r.shape) for t, r in zip(kept, routing, strict=True))), dropped

    @staticmethod
    def _product(x: Tensor, weight: Tensor) -> Tensor:
        """Computes x weight^T in fp32 (fp64 for fp64), under autocast too."""
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, weight = x.to(compute), weight.to(compute)
        if autocast_dtype(x) is None:
            return functional.linear(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight)
