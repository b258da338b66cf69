"""Mixture of experts as a feed-forward layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from omniattn import functional
from omniattn.functional._checks import require_float, require_int, require_number
from omniattn.functional.routing import BALANCE_LOSSES, ROUTER_GRADS, Routing
from omniattn.functional.routing._checks import require_mask
from omniattn.functional.routing.routers import check_groups
from omniattn.modules.experts import Experts
from omniattn.modules.layer import LayerConfig, config_or_fields
from omniattn.modules.linear import Linear
from omniattn.modules.mixer import ChannelMixer
from omniattn.modules.mlp import GatedMLP
from omniattn.modules.router import ROUTERS, Router
from omniattn.ops.moe import ACTIVATIONS

#: Of the noisy router: squared variation of importance and of load (Shazeer et al. 2017).
IMPORTANCE_LOAD = "importance_load"


class RouterState(NamedTuple):
    """What the router of a :class:`MoE` did in the last forward.

    A forward that activation checkpointing repeats in the backward does not count.

    Attributes:
        experts: (..., k) int64, as executed: -1 where an assignment was dropped or masked.
        counts: (E,) int64, assignments before any was dropped.
        dropped: () int64, assignments over capacity.
        entropy: () of the mean scores of the real tokens in nats: log E where the load is even, 0
            for no tokens. Detached.
        balance_loss: () with its coefficient and gradient, 0 without one and in inference: in eval
            under no_grad.
        z_loss: the same of the z-loss.
    """

    experts: Tensor
    counts: Tensor
    dropped: Tensor
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor


class MoE(ChannelMixer):
    """y = sum of the chosen experts, weighted by the router, + shared experts.

    Args:
        config: sizes and options; the class methods of `Config` give published layers.
        device, dtype: of the parameters.

    Shape:
        x (..., T, dim) -> (..., T, dim). Parameters gate.weight (E, dim), experts.gate_up_proj (E,
        2 hidden_dim, dim), or (E, hidden_dim, dim) where the activation has no gate,
        experts.down_proj (E, dim, hidden_dim), shared_experts, shared_expert_gate.weight (1, dim);
        the buffer gate.e_score_correction_bias (E,) of the sigmoid router, which stays in fp32 when
        the layer becomes half. Names as in transformers.

    Note:
        Logits are computed in fp32. `state` holds counts, losses and what else a training loop
        needs of the last forward: add `state.balance_loss + state.z_loss` to the loss. After the
        step call :meth:`update_bias` with the sigmoid router, :meth:`update_default_vectors` with
        router_grad="default_vector". Jitter, noise and (unless `capacity_at_eval`) capacity apply
        in training only; padding takes no room and makes none. Under
        `checkpoint(use_reentrant=True)` the losses in `state` have no gradient, and a copy of the
        layer has no state. A compiled checkpoint needs
        `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`.

    Reference:
        Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538.

    Example:
        >>> layer = MoE(MoE.Config(8, 16, experts=4, top_k=2))
        >>> layer(torch.ones(1, 3, 8)).shape, layer.state.counts.sum()
        (torch.Size([1, 3, 8]), tensor(6))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options of the layer.

        `router`: softmax, sigmoid, llama4 (whose weights multiply the experts' inputs), noisy
        (top_k of them), or expert_choice, for which `capacity_factor` is needed and k unused.
        `renormalize`, `route_scale`, `groups`, `top_groups`, `router_grad`, `jitter`, `noise_eps`,
        `balance`: see omniattn.functional.routing; "importance_load", of the noisy router alone, is
        the sum of both `cv_squared`. `default_decay`: of the default vectors.
        `capacity_factor`: None never drops; `capacity` gives the room of an expert in tokens
        instead. It is for the batch or, with `capacity_per_sequence`, for each sequence, as in
        transformers' Switch; earlier tokens take it first or, with `capacity_by_score`, the most
        probable ones (V-MoE). `shared_hidden_dim`: width of the experts that take every token, 0
        for none; `shared_gate`: sigmoid gate in front of them (Qwen2-MoE). `clamp`: alpha and limit
        of clamped_swiglu. `bias_rate`: of `update_bias`.
        """

        dim: int
        hidden_dim: int
        experts: int
        top_k: int
        activation: str = "swiglu"
        bias: bool = False
        clamp: tuple[float, float] = (1.702, 7.0)
        router: str = "softmax"
        router_bias: bool = False
        renormalize: bool = True
        route_scale: float = 1.0
        groups: int = 1
        top_groups: int = 1
        router_grad: str = "exact"
        default_decay: float = 0.9
        jitter: float = 0.0
        noise_eps: float = 0.0
        capacity_factor: float | None = None
        capacity: int | None = None
        capacity_per_sequence: bool = False
        capacity_by_score: bool = False
        capacity_at_eval: bool = False
        shared_hidden_dim: int = 0
        shared_gate: bool = False
        balance: str = "switch"
        balance_coefficient: float = 0.0
        z_coefficient: float = 0.0
        bias_rate: float = 1e-3
        recompute: bool = False
        init_std: float = 0.02
        out_init_std: float = 0.02
        backend: str | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, allowed in (
                ("activation", tuple(ACTIVATIONS)),
                ("router", ROUTERS),
                ("router_grad", ROUTER_GRADS),
                ("balance", (*BALANCE_LOSSES, IMPORTANCE_LOAD)),
            ):
                value = getattr(self, name)
                if value not in allowed:
                    raise ValueError(
                        f"MoE: {name} must be one of {', '.join(allowed)}, got {name}={value!r}"
                    )
            if not 1 <= self.top_k <= self.experts:
                raise ValueError(
                    f"MoE: top_k must be in [1, experts], got top_k={self.top_k}, "
                    f"experts={self.experts}"
                )
            if self.top_k == 1 and self.renormalize and self.router == "softmax":
                warnings.warn(
                    "MoE: top_k=1 with renormalize=True gives weight 1 to every token: its router "
                    "learns from the balance loss alone",
                    stacklevel=3,
                )
            if self.router_grad != "exact" and self.router != "softmax":
                raise ValueError(
                    "MoE: router_grad must be exact but for router='softmax', "
                    f"got router_grad={self.router_grad!r}, router={self.router!r}"
                )
            self._check_router()

        def _check_router(self) -> None:
            """An option that the router does not have is an error, not ignored."""
            if self.router == "expert_choice" and self.capacity_factor is None:
                raise ValueError("MoE: router='expert_choice' needs a capacity_factor, got None")
            if self.capacity is not None and self.capacity_factor is not None:
                raise ValueError(
                    "MoE: capacity and capacity_factor must not both be given, "
                    f"got capacity={self.capacity}, capacity_factor={self.capacity_factor}"
                )
            if self.router_grad == "ste_dense" and self.limited:
                raise ValueError(
                    "MoE: router_grad='ste_dense' evaluates every expert: capacity and "
                    "capacity_factor must be None, "
                    f"got capacity={self.capacity}, capacity_factor={self.capacity_factor}"
                )
            for name in ("capacity_per_sequence", "capacity_by_score", "capacity_at_eval"):
                if getattr(self, name) and not self.limited:
                    raise ValueError(
                        f"MoE: {name} needs capacity or capacity_factor, got None of both"
                    )
            if self.capacity is not None:
                require_int("MoE", "capacity", self.capacity, 0)
            if self.capacity_factor is not None:
                require_number("MoE", "capacity_factor", self.capacity_factor, 0)
            require_number("MoE", "default_decay", self.default_decay, 0, 1)
            require_number("MoE", "jitter", self.jitter, 0, below=1)
            if len(self.clamp) != 2:
                raise ValueError(f"MoE: clamp must be (alpha, limit), got clamp={self.clamp}")
            for name, value in zip(("alpha", "limit"), self.clamp, strict=True):
                require_number("MoE", f"{name} of clamp", value, above=0)
            check_groups("MoE", self.experts, self.groups, self.top_groups, self.top_k)
            if self.router not in ("softmax", "sigmoid"):
                limits = {"route_scale": 1.0, "top_groups": self.groups}
                for name, only in limits.items():
                    if getattr(self, name) != only:
                        raise ValueError(
                            f"MoE: {name} must be {only} but for router='softmax' and 'sigmoid', "
                            f"got {name}={getattr(self, name)}, router={self.router!r}"
                        )
            if self.router != "noisy" and (self.noise_eps or self.balance == IMPORTANCE_LOAD):
                raise ValueError(
                    f"MoE: noise_eps and balance={IMPORTANCE_LOAD!r} need router='noisy', "
                    f"got noise_eps={self.noise_eps}, balance={self.balance!r}, "
                    f"router={self.router!r}"
                )
            if self.shared_gate and not self.shared_hidden_dim:
                raise ValueError(
                    "MoE: shared_gate needs shared experts, got shared_hidden_dim="
                    f"{self.shared_hidden_dim}"
                )

        @property
        def limited(self) -> bool:
            """Whether experts drop what they have no room for."""
            return self.capacity is not None or self.capacity_factor is not None

        @classmethod
        def mixtral(cls, dim: int, hidden_dim: int, experts: int = 8, top_k: int = 2) -> MoE.Config:
            """Jiang et al. 2024, arXiv 2401.04088; Qwen3-MoE too."""
            return cls(dim, hidden_dim, experts, top_k, balance_coefficient=2e-2)

        @classmethod
        def switch(cls, dim: int, hidden_dim: int, experts: int) -> MoE.Config:
            """Fedus et al. 2021, arXiv 2101.03961: top-1, ReLU experts, capacity 1.25."""
            return cls(
                dim,
                hidden_dim,
                experts,
                1,
                activation="relu",
                renormalize=False,
                jitter=1e-2,
                capacity_factor=1.25,
                balance_coefficient=1e-2,
            )

        @classmethod
        def llama4(cls, dim: int, hidden_dim: int, experts: int, top_k: int = 1) -> MoE.Config:
            """Meta AI 2025, Llama 4: top-1 of a sigmoid on the inputs, one shared expert."""
            return cls(
                dim,
                hidden_dim,
                experts,
                top_k,
                router="llama4",
                shared_hidden_dim=hidden_dim,
                balance_coefficient=1e-3,
            )

        @classmethod
        def qwen2_moe(
            cls, dim: int, hidden_dim: int, experts: int, top_k: int, shared_hidden_dim: int
        ) -> MoE.Config:
            """Qwen1.5-MoE and Qwen2-MoE: a gated shared expert, no renormalisation."""
            return cls(
                dim,
                hidden_dim,
                experts,
                top_k,
                renormalize=False,
                shared_hidden_dim=shared_hidden_dim,
                shared_gate=True,
                balance_coefficient=1e-3,
            )

        @classmethod
        def deepseek_v2(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int = 160,
            top_k: int = 6,
            *,
            shared: int = 2,
            groups: int = 8,
            top_groups: int = 3,
            route_scale: float = 16.0,
        ) -> MoE.Config:
            """DeepSeek-AI 2024, arXiv 2405.04434: group-limited softmax routing."""
            return cls(
                dim,
                hidden_dim,
                experts,
                top_k,
                renormalize=False,
                route_scale=route_scale,
                groups=groups,
                top_groups=top_groups,
                shared_hidden_dim=shared * hidden_dim,
                balance="deepseek_v2",
                balance_coefficient=3e-3,
            )

        @classmethod
        def deepseek_v3(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int = 256,
            top_k: int = 8,
            *,
            shared: int = 1,
            groups: int = 8,
            top_groups: int = 4,
            route_scale: float = 2.5,
        ) -> MoE.Config:
            """DeepSeek-AI 2024, arXiv 2412.19437: sigmoid routing balanced by a bias."""
            return cls(
                dim,
                hidden_dim,
                experts,
                top_k,
                router="sigmoid",
                route_scale=route_scale,
                groups=groups,
                top_groups=top_groups,
                shared_hidden_dim=shared * hidden_dim,
                balance="deepseek_v3",
                balance_coefficient=1e-4,
            )

    state: RouterState | None

    @config_or_fields(Config)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.gate = Router(c, device=device, dtype=dtype)
        self.experts = Experts(c, device=device, dtype=dtype)
        self.shared_experts: GatedMLP | None = None
        if c.shared_hidden_dim:
            shared = GatedMLP.Config(
                c.dim,
                c.shared_hidden_dim,
                init_std=c.init_std,
                out_init_std=c.out_init_std,
                backend=c.backend,
            )
            self.shared_experts = GatedMLP(shared, device=device, dtype=dtype)
        self.shared_expert_gate: Linear | None = None
        if c.shared_gate:
            gate = Linear.Config(c.dim, 1, init_std=c.init_std, backend=c.backend)
            self.shared_expert_gate = Linear(gate, device=device, dtype=dtype)
        self.state = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has seen no forward: tensors of a graph cannot be copied nor pickled.
        return self.__dict__ | {"state": None}

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """x (..., T, dim) -> (..., T, dim); token_mask (..., T) bool, False for padding, whose
        output is that of the shared experts alone."""
        routing, state = self.route(x, token_mask)
        if not _in_backward():
            self.state = state
        y: Tensor = self.experts(x, routing)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(x).sigmoid() * shared
            y = y + shared
        return y

    def route(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Routing, RouterState]:
        """The routing that forward executes, and its state."""
        c = self.config
        require_float("MoE", "x", x)
        if x.dim() < 2 or x.shape[-1] != c.dim:
            raise ValueError(
                f"MoE: x must have shape (..., T, {c.dim}), got x.shape={tuple(x.shape)}"
            )
        if token_mask is not None:
            require_mask("MoE", token_mask, x, "x")
        logits, routing, load = self.gate(x, token_mask)
        experts = routing.experts
        if token_mask is not None:
            hidden = ~token_mask[..., None]
            experts = experts.masked_fill(hidden, -1)
            routing = routing._replace(
                experts=experts, weights=routing.weights.masked_fill(hidden, 0.0)
            )
        if c.router_grad == "ste_dense":  # which evaluates the others too, with weight 0
            experts = experts.masked_fill(routing.weights == 0, -1)
        counts = functional.expert_counts(experts, c.experts)
        learns = self.training or torch.is_grad_enabled()
        balance_loss = z_loss = routing.scores.new_zeros(())
        if c.balance_coefficient and learns:
            loss = self._imbalance(routing._replace(experts=experts), load, token_mask)
            balance_loss = c.balance_coefficient * loss
        if c.z_coefficient and learns:
            z_loss = c.z_coefficient * functional.router_z_loss(logits, token_mask=token_mask)
        dropped = counts.new_zeros(())
        if c.limited and (self.training or c.capacity_at_eval) and c.router != "expert_choice":
            routing, dropped = self._drop(routing, token_mask)
        seen = routing.scores.detach()
        if token_mask is not None:
            seen = seen.masked_fill(~token_mask[..., None], 0.0)
        total = seen.flatten(0, -2).sum(0)
        share = total / total.sum().clamp(min=torch.finfo(total.dtype).tiny)
        entropy = torch.special.entr(share).sum()
        state = RouterState(routing.experts, counts, dropped, entropy, balance_loss, z_loss)
        return routing, state

    def _imbalance(
        self, routing: Routing, load: Tensor | None, token_mask: Tensor | None
    ) -> Tensor:
        """The loss of `config.balance` for the assignments before any is dropped."""
        c = self.config
        if c.balance == IMPORTANCE_LOAD:
            assert load is not None
            importance = functional.expert_importance(routing)
            return functional.cv_squared(importance) + functional.cv_squared(load)
        counted = routing.experts
        if c.balance == "deepseek_v3":  # the published loss counts the choice without the bias
            counted = functional.top_k(routing.scores, c.top_k)[1]
            if token_mask is not None:
                counted = counted.masked_fill(~token_mask[..., None], -1)
        return functional.load_balance_loss(
            routing.scores,
            counted,
            kind=c.balance,
            token_mask=token_mask,
            groups=c.groups,
            top_groups=c.top_groups,
        )

    def _drop(self, routing: Routing, token_mask: Tensor | None) -> tuple[Routing, Tensor]:
        """The routing without what finds no room, and how much that was."""
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

    @torch.no_grad()
    def update_bias(
        self,
        rate: float | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        counts: Tensor | None = None,
    ) -> None:
        """Moves the bias of the sigmoid router by `rate` (default: `bias_rate`) against `counts`.

        `counts` (E,) are those of the last forward by default; who accumulates gradients adds up
        `state.counts` of the forwards of a step. They are summed over the ranks of `group`, where
        one is given.
        """
        bias = self.gate.e_score_correction_bias
        if counts is None and self.state is not None:
            counts = self.state.counts
        if bias is None or counts is None:
            raise RuntimeError("MoE: update_bias needs router='sigmoid' and a forward before it")
        if group is not None:
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=group)
        functional.update_router_bias(bias, counts, self.config.bias_rate if rate is None else rate)

    def update_default_vectors(self) -> None:
        """Moves the default vectors towards the mean outputs of the last forward in training."""
        self.experts.update_default_vectors()


def _in_backward() -> bool:
    """Whether a backward is running, so that a forward is one that checkpointing repeats."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1
