"""Routers of mixtures of experts, router losses and capacity, in plain torch.

A router turns logits (..., E) into a :class:`Routing` that
:func:`omniattn.functional.moe_experts` executes. They compute in fp32 (fp64 for fp64), choose by
:func:`omniattn.functional.top_k`, so that equal scores go to the smaller expert on every device,
and differentiate as they are written. Slots without an expert have index -1 and weight 0.
"""

from omniattn.functional.routing.capacity import (
    drop_over_capacity,
    drop_second_at_random,
    expert_capacity,
)
from omniattn.functional.routing.defaults import (
    default_vector_gradient,
    update_default_vectors,
)
from omniattn.functional.routing.losses import (
    BALANCE_LOSSES,
    cv_squared,
    expert_importance,
    load_balance_loss,
    router_z_loss,
    update_router_bias,
)
from omniattn.functional.routing.noise import noisy_top_k, router_jitter
from omniattn.functional.routing.routers import (
    ROUTER_GRADS,
    expert_choice,
    llama4_top_k,
    sigmoid_top_k,
    softmax_top_k,
    top_k_softmax,
)
from omniattn.functional.routing.routing import Routing, expert_counts

__all__ = [
    "BALANCE_LOSSES",
    "ROUTER_GRADS",
    "Routing",
    "cv_squared",
    "default_vector_gradient",
    "drop_over_capacity",
    "drop_second_at_random",
    "expert_capacity",
    "expert_choice",
    "expert_counts",
    "expert_importance",
    "llama4_top_k",
    "load_balance_loss",
    "noisy_top_k",
    "router_jitter",
    "router_z_loss",
    "sigmoid_top_k",
    "softmax_top_k",
    "top_k_softmax",
    "update_default_vectors",
    "update_router_bias",
]
