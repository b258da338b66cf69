"""Mixture-of-experts feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_float, shown
from omniattn.checks.tracing import may_train
from omniattn.functional.routing import BALANCE_LOSSES, Routing
from omniattn.functional.routing._checks import require_mask
from omniattn.functional.routing.groups import TokenGroups
from omniattn.functional.routing.losses import balance_over, z_loss_over
from omniattn.modules.base.forms import ByConfig, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import ChannelMixer
from omniattn.modules.base.mlp import GatedMLP
from omniattn.modules.experts.experts import Experts
from omniattn.modules.experts.router import Router
from omniattn.modules.experts.router_state import RouterState, in_backward, load_entropy

#: Loss of the noisy router: squared coefficients of variation of importance and load (Shazeer et
#: al. 2017).
IMPORTANCE_LOAD = "importance_load"


class MoE(ChannelMixer):
    """Computes y = weighted sum of the experts that the router chooses, + shared experts.

    Args:
        config: config of the parts, or the arguments of `Config.of` instead; further class methods
            of `Config` are presets of published layers.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (..., T, dim) -> (..., T, dim). Parameters gate.weight (E, dim), experts.gate_up_proj (E,
        2 hidden_dim, dim), or (E, hidden_dim, dim) if the activation has no gate,
        experts.down_proj (E, dim, hidden_dim), shared_experts, shared_expert_gate.weight (1, dim);
        buffer gate.e_score_correction_bias (E,) of the sigmoid router, which stays in fp32 when the
        layer is converted to half. Names as in transformers.

    Note:
        Logits are computed in fp32. `state` holds counts, losses and other statistics of the last
        forward; add `state.balance_loss + state.z_loss` to the training loss. After each optimizer
        step call :meth:`update_bias` with the sigmoid router, or :meth:`update_default_vectors`
        with router_grad="default_vector". Jitter, noise and (unless `capacity_at_eval`) capacity
        apply in training only. Padding tokens neither consume capacity nor count towards it. Under
        `checkpoint(use_reentrant=True)` the losses in `state` have no gradient. Copies of the layer
        have no state. A compiled checkpoint requires
        `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`.

    Reference:
        Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538.

    Example:
        >>> layer = MoE(8, 16, experts=4, top_k=2)
        >>> layer(torch.ones(1, 3, 8)).shape, layer.state.counts.sum()
        (torch.Size([1, 3, 8]), tensor(6))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Configs of the parts; `of` creates them from flat options.

        Args:
            gate, experts: configs of the router and of the routed experts.
            shared: config of the shared experts, which process every token, as one layer.
            shared_gate: True for a sigmoid gate on the shared experts' output (Qwen2-MoE).
            balance: balance loss, see omniattn.functional.load_balance_loss; "importance_load",
                only for the noisy router, is cv_squared(importance) + cv_squared(load).
            balance_coefficient, z_coefficient: coefficients of the losses, 0 for none.
        """

        gate: Router.Config
        experts: Experts.Config
        shared: GatedMLP.Config | None = None
        shared_gate: bool = False
        balance: str = "switch"
        balance_coefficient: float = 0.0
        z_coefficient: float = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("dim", "experts"):
                ours, theirs = getattr(self.gate, name), getattr(self.experts, name)
                if ours != theirs:
                    raise ValueError(
                        f"MoE: gate and experts must have the same {name}, "
                        f"got gate.{name}={ours}, experts.{name}={theirs}"
                    )
            if self.experts.default_vectors != (self.gate.router_grad == "default_vector"):
                raise ValueError(
                    "MoE: experts must have default_vectors if and only if router_grad is "
                    f"'default_vector', got default_vectors={self.experts.default_vectors}, "
                    f"router_grad={shown(self.gate.router_grad)}"
                )
            allowed = (*BALANCE_LOSSES, IMPORTANCE_LOAD)
            if self.balance not in allowed:
                raise ValueError(
                    f"MoE: balance must be one of {', '.join(allowed)}, "
                    f"got balance={shown(self.balance)}"
                )
            if self.balance == IMPORTANCE_LOAD and self.gate.router != "noisy":
                raise ValueError(
                    f"MoE: balance={shown(IMPORTANCE_LOAD)} needs router='noisy', "
                    f"got router={shown(self.gate.router)}"
                )
            if self.shared_gate and self.shared is None:
                raise ValueError("MoE: shared_gate needs shared experts, got shared=None")

        @classmethod
        def of(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int,
            top_k: int,
            *,
            shared_hidden_dim: int = 0,
            **options: Any,
        ) -> MoE.Config:
            """Creates a config from sizes and the fields of Router.Config, Experts.Config and MoE.

            Fields common to several parts (init_std, ...) apply to all of them. Fields of the
            experts that depend on the router are derived from it. `shared_hidden_dim` is the inner
            width of the shared experts, 0 for none.
            """
            router = options.get("router", "softmax")
            options |= {"dim": dim, "hidden_dim": hidden_dim, "experts": experts, "top_k": top_k}
            options.setdefault("weigh_inputs", router == "llama4")
            options.setdefault("default_vectors", options.get("router_grad") == "default_vector")
            # With expert choice most of the E slots per token are empty, but saved activations
            # would include them all.
            options["recompute"] = options.get("recompute", False) or router == "expert_choice"

            def of(kind: type[LayerConfig], *but: str) -> dict[str, Any]:
                names = {field.name for field in fields(kind)}.difference(but)
                return {name: options[name] for name in options if name in names}

            gate, each = of(Router.Config), of(Experts.Config)
            own = of(cls, "gate", "experts", "shared")
            if unknown := options.keys() - {*gate, *each, *own}:
                raise TypeError(f"unknown options {', '.join(sorted(unknown))}")
            shared = None
            if shared_hidden_dim != 0:
                common = of(GatedMLP.Config, "hidden_dim", "activation", "bias", "recompute")
                shared = GatedMLP.Config(hidden_dim=shared_hidden_dim, **common)
            return cls(Router.Config(**gate), Experts.Config(**each), shared, **own)

        @classmethod
        def mixtral(
            cls, dim: int, hidden_dim: int, experts: int = 8, top_k: int = 2, **options: Any
        ) -> MoE.Config:
            """Mixtral (Jiang et al. 2024, arXiv 2401.04088) and Qwen3-MoE."""
            own: dict[str, Any] = {"balance_coefficient": 2e-2}
            return cls.of(dim, hidden_dim, experts, top_k, **own | options)

        @classmethod
        def switch(cls, dim: int, hidden_dim: int, experts: int, **options: Any) -> MoE.Config:
            """Switch Transformer (Fedus et al. 2021, arXiv 2101.03961): top-1, capacity 1.25."""
            own: dict[str, Any] = {
                "activation": "relu",
                "renormalize": False,
                "jitter": 1e-2,
                "capacity_factor": 1.25,
                "balance_coefficient": 1e-2,
            }
            return cls.of(dim, hidden_dim, experts, 1, **own | options)

        @classmethod
        def llama4(
            cls, dim: int, hidden_dim: int, experts: int, top_k: int = 1, **options: Any
        ) -> MoE.Config:
            """Llama 4 (Meta AI 2025): sigmoid top-1 weights on the inputs, one shared expert."""
            own: dict[str, Any] = {
                "router": "llama4",
                "shared_hidden_dim": hidden_dim,
                "balance_coefficient": 1e-3,
            }
            return cls.of(dim, hidden_dim, experts, top_k, **own | options)

        @classmethod
        def qwen2_moe(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int,
            top_k: int,
            shared_hidden_dim: int,
            **options: Any,
        ) -> MoE.Config:
            """Qwen1.5-MoE and Qwen2-MoE: a gated shared expert, no renormalisation."""
            own: dict[str, Any] = {
                "renormalize": False,
                "shared_hidden_dim": shared_hidden_dim,
                "shared_gate": True,
                "balance_coefficient": 1e-3,
            }
            return cls.of(dim, hidden_dim, experts, top_k, **own | options)

        @classmethod
        def deepseek_v2(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int = 160,
            top_k: int = 6,
            *,
            shared: int = 2,
            **options: Any,
        ) -> MoE.Config:
            """DeepSeek-V2 (2024, arXiv 2405.04434): group-limited softmax routing."""
            own: dict[str, Any] = {
                "renormalize": False,
                "route_scale": 16.0,
                "groups": 8,
                "top_groups": 3,
                "shared_hidden_dim": shared * hidden_dim,
                "balance": "deepseek_v2",
                "balance_coefficient": 3e-3,
            }
            return cls.of(dim, hidden_dim, experts, top_k, **own | options)

        @classmethod
        def deepseek_v3(
            cls,
            dim: int,
            hidden_dim: int,
            experts: int = 256,
            top_k: int = 8,
            *,
            shared: int = 1,
            **options: Any,
        ) -> MoE.Config:
            """DeepSeek-V3 (2024, arXiv 2412.19437): sigmoid routing balanced by a bias."""
            own: dict[str, Any] = {
                "router": "sigmoid",
                "route_scale": 2.5,
                "groups": 8,
                "top_groups": 4,
                "shared_hidden_dim": shared * hidden_dim,
                "balance": "deepseek_v3",
                "balance_coefficient": 1e-4,
            }
            return cls.of(dim, hidden_dim, experts, top_k, **own | options)

    state: RouterState | None
    _ranks: TokenGroups = TokenGroups()

    @config_or_fields(Config, either(ByConfig[Config], Config.of).init, make=Config.of)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        self.gate = Router(c.gate, device=device, dtype=dtype)
        self.experts = Experts(c.experts, device=device, dtype=dtype)
        self.shared_experts: GatedMLP | None = None
        if c.shared is not None:
            self.shared_experts = GatedMLP(c.shared, device=device, dtype=dtype)
        self.shared_expert_gate: Linear | None = None
        if c.shared_gate:
            init_std, backend = c.gate.init_std, c.experts.backend
            gate = Linear.Config(c.gate.dim, 1, init_std=init_std, backend=backend)
            self.shared_expert_gate = Linear(gate, device=device, dtype=dtype)
        self.state = None

    def __getstate__(self) -> dict[str, Any]:
        # Non-leaf tensors can neither be copied nor pickled.
        return self.__dict__ | {"state": None, "_ranks": TokenGroups()}

    def balance_over(
        self,
        group: torch.distributed.ProcessGroup | None,
        sequences: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Makes balance and z-losses those of the tokens of all ranks, in forward and backward.

        Each rank's loss then is the loss of all tokens. Multiply it on each rank by a share of the
        step, as the model's loss; the shares of all ranks add up to that of one process. Copies of
        the layer count the tokens of their rank again.

        Args:
            group: ranks with the tokens of a forward, which all make it; None for this rank alone.
            sequences: the ranks among them with other tokens of the same sequences, as in context
                parallelism; None for none.
        """
        self._ranks = TokenGroups(group, sequences)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Maps x (..., T, dim), or jagged (B, j, dim), to the same shape.

        token_mask (..., T) bool is False for padding, which only the shared experts process.
        """
        if isinstance(x, Tensor) and x.is_nested:
            return self._of_sequences(x, token_mask)
        return self._of_batch(x, token_mask)

    def _of_batch(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        routing, state = self.route(x, token_mask)
        if not in_backward():
            self.state = state
        y: Tensor = self.experts(x, routing)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(x).sigmoid() * shared
            y = y + shared
        return y

    def _of_sequences(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """Pads a nested x to a batch, since capacities and losses are per sequence."""
        if token_mask is not None:
            raise ValueError(
                "MoE: token_mask must be None where x is nested, "
                f"got token_mask.shape={tuple(token_mask.shape)}"
            )
        rows, sequences = sequences_of("MoE", "x", x)
        places = torch.arange(sequences.longest, device=x.device)
        inside = places < sequences.sizes(rows)[:, None]
        return sequences.restored(sequences.in_batches(lambda t: self._of_batch(t, inside), rows))

    def route(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Routing, RouterState]:
        """Computes the routing that forward executes, and its state."""
        c, dim = self.config.gate, self.config.gate.dim
        require_float("MoE", "x", x)
        if x.dim() < 2 or x.shape[-1] != dim:
            raise ValueError(
                f"MoE: x must have shape (..., T, {dim}), got x.shape={tuple(x.shape)}"
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
        if c.router_grad == "ste_dense":  # evaluates the other experts too, with weight 0
            experts = experts.masked_fill(routing.weights == 0, -1)
        counts = functional.expert_counts(experts, c.experts)
        losses = self._losses(logits, routing._replace(experts=experts), load, token_mask)
        dropped = counts.new_zeros(())
        if c.limited and (self.training or c.capacity_at_eval) and c.router != "expert_choice":
            routing, dropped = self.gate.drop(routing, token_mask)
        entropy = load_entropy(routing.scores.detach(), token_mask)
        return routing, RouterState(routing.experts, counts, dropped, entropy, *losses)

    def _losses(
        self, logits: Tensor, routing: Routing, load: Tensor | None, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes balance and z-loss, times their coefficients, before assignments are dropped."""
        c = self.config
        balance_loss = z_loss = routing.scores.new_zeros(())
        if not (self.training or may_train()):
            return balance_loss, z_loss
        if c.balance_coefficient:
            balance_loss = c.balance_coefficient * self._imbalance(routing, load, token_mask)
        if c.z_coefficient:
            z_loss = c.z_coefficient * z_loss_over(self._ranks, logits, token_mask)
        return balance_loss, z_loss

    def _imbalance(
        self, routing: Routing, load: Tensor | None, token_mask: Tensor | None
    ) -> Tensor:
        """Computes the loss `config.balance` of the assignments before any are dropped."""
        c = self.config
        if c.balance == IMPORTANCE_LOAD:
            assert load is not None
            (importance,) = self._ranks.totals(functional.expert_importance(routing))
            (load,) = self._ranks.totals(load)
            return functional.cv_squared(importance) + functional.cv_squared(load)
        counted = routing.experts
        if c.balance == "deepseek_v3":  # the published loss counts the top k without the bias
            counted = functional.top_k(routing.scores, c.gate.top_k)[1]
            if token_mask is not None:
                counted = counted.masked_fill(~token_mask[..., None], -1)
        groups = c.gate.groups, c.gate.top_groups
        return balance_over(self._ranks, routing.scores, counted, c.balance, token_mask, *groups)

    @torch.no_grad()
    def update_bias(
        self,
        rate: float | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        counts: Tensor | None = None,
    ) -> None:
        """Moves the sigmoid router's bias by `rate` (default: `bias_rate`) to even out `counts`.

        `counts` (E,) default to the last forward's. With gradient accumulation, pass the sum of
        `state.counts` over a step's forwards. With a `group`, counts are summed over its ranks.
        """
        bias = self.gate.e_score_correction_bias
        if counts is None and self.state is not None:
            counts = self.state.counts
        if bias is None or counts is None:
            raise RuntimeError("MoE: update_bias needs router='sigmoid' and a forward before it")
        if group is not None:
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=group)
        rate = self.config.gate.bias_rate if rate is None else rate
        functional.update_router_bias(bias, counts, rate)

    def update_default_vectors(self) -> None:
        """Moves the default vectors towards the mean outputs of the last forward in training."""
        self.experts.update_default_vectors()
