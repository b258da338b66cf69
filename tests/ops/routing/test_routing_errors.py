"""Routers, capacity and their losses refuse what does not fit."""

import math

import pytest
import torch

import omniattn.functional as F

#: Two tokens, one of four experts each.
ROUTING = F.softmax_top_k(torch.ones(2, 4), 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.softmax_top_k(torch.ones(2, 4), 5), ValueError, "1 <= k <= E"),
        (lambda: F.softmax_top_k(torch.ones(2, 4), 0), ValueError, "1 <= k <= E"),
        (lambda: F.top_k_softmax(torch.ones(2, 4).long(), 1), TypeError, "logits must be float"),
        (lambda: F.softmax_top_k(torch.ones(2, 4), 1, groups=3), ValueError, "groups must divide"),
        (
            lambda: F.sigmoid_top_k(torch.ones(2, 4), 3, groups=2, top_groups=1),
            ValueError,
            "at most the experts of top_groups",
        ),
        (
            lambda: F.softmax_top_k(torch.ones(2, 4), 1, router_grad="dense"),
            ValueError,
            "router_grad must be one of",
        ),
        (
            lambda: F.sigmoid_top_k(torch.ones(2, 4), 1, bias=torch.ones(3)),
            ValueError,
            r"bias must have shape \(4,\)",
        ),
        (lambda: F.expert_choice(torch.ones(2, 4), 3), ValueError, "0 <= capacity <= n"),
        (
            lambda: F.expert_choice(torch.ones(2, 4), torch.ones(2).long()),
            ValueError,
            r"capacity must have shape \(\)",
        ),
        (
            lambda: F.drop_over_capacity(ROUTING, torch.ones(2).long()),
            ValueError,
            r"capacity must have shape \(\)",
        ),
        (lambda: F.drop_over_capacity(ROUTING, torch.ones(())), TypeError, "must be integers"),
        (
            lambda: F.softmax_top_k(torch.ones(2, 4), 2, renormalize="no"),
            TypeError,
            "renormalize must be True or False",
        ),
        (lambda: F.expert_counts(torch.tensor([4]), 4), RuntimeError, "out of bounds"),
        (lambda: F.expert_counts(torch.tensor([-1]), 0), ValueError, "experts must be an int >= 1"),
        (
            lambda: F.drop_over_capacity(ROUTING._replace(experts=torch.ones(2, 1)), 1),
            TypeError,
            "routing.experts must be integers",
        ),
        (
            lambda: F.expert_importance(ROUTING._replace(scores=torch.ones(3, 4))),
            ValueError,
            r"got experts.shape=\(2, 1\), scores.shape=\(3, 4\)",
        ),
        (
            lambda: F.expert_importance(ROUTING._replace(weights=torch.ones(2, 2))),
            ValueError,
            r"routing.weights must have shape \(2, 1\)",
        ),
        (
            lambda: F.drop_over_capacity(F.Routing(*(t[0] for t in ROUTING)), 1),
            ValueError,
            r"experts \(..., n, k\), got experts.shape=\(1,\)",
        ),
        (
            lambda: F.load_balance_loss(torch.ones(4), torch.tensor(1)),
            ValueError,
            r"index \(..., k\), got index.shape=\(\)",
        ),
        (lambda: F.router_z_loss(torch.tensor(1.0)), ValueError, r"logits must have shape"),
        (lambda: F.llama4_top_k(torch.ones(2, 4), 5), ValueError, "1 <= k <= E"),
        (
            lambda: F.default_vector_gradient(
                torch.ones(2, 3), F.softmax_top_k(torch.ones(2, 4), 1), torch.ones(4, 2)
            ),
            ValueError,
            r"vectors must have shape \(4, 3\)",
        ),
        (
            lambda: F.update_default_vectors(
                torch.ones(4, 3), torch.ones(2, 1, 3), torch.zeros(2, 1).long(), decay=2.0
            ),
            ValueError,
            "decay must be a finite number >= 0 and <= 1, got decay=2.0",
        ),
        (
            lambda: F.drop_over_capacity(F.softmax_top_k(torch.ones(2, 4), 1), -1),
            ValueError,
            "capacity must be an int >= 0",
        ),
        (lambda: F.expert_capacity(4, 0, 1, 1.0), ValueError, "experts must be an int >= 1"),
        (
            lambda: F.router_jitter(torch.ones(2), 1.0, torch.zeros(2).long()),
            ValueError,
            "eps must be",
        ),
        (
            lambda: F.load_balance_loss(torch.ones(2, 4), torch.zeros(2, 1).long(), kind="gini"),
            ValueError,
            "kind must be one of",
        ),
        (
            lambda: F.load_balance_loss(torch.ones(2, 4), torch.zeros(3, 1).long()),
            ValueError,
            r"scores must have shape \(..., E\)",
        ),
        (
            lambda: F.drop_second_at_random(F.softmax_top_k(torch.ones(2, 4), 1), torch.zeros(2)),
            ValueError,
            "routing must have k = 2",
        ),
        (
            lambda: F.default_vector_gradient(torch.ones(2, 3), ROUTING, torch.ones(4, 3).long()),
            TypeError,
            r"vectors must be float64, .* got vectors.dtype=torch.int64",
        ),
        (
            lambda: F.default_vector_gradient(
                torch.ones(2, 3), ROUTING, torch.ones(4, 3, device="meta")
            ),
            ValueError,
            "vectors must be on the device of y, got vectors.device=meta, y.device=cpu",
        ),
        (
            lambda: F.update_default_vectors(
                torch.ones(4, 3), torch.ones(2, 1, 3), torch.zeros(2, 1)
            ),
            TypeError,
            r"index must be integers, got index.dtype=torch.float32",
        ),
        (
            lambda: F.update_default_vectors(
                torch.ones(4), torch.ones(2, 1, 3), torch.zeros(2, 1).long()
            ),
            ValueError,
            r"vectors must have shape \(E, d\), got vectors.shape=\(4,\)",
        ),
        (
            lambda: F.update_default_vectors(
                torch.ones(4, 3), torch.ones(2, 1, 3), torch.zeros(2, 1).long(), decay=math.nan
            ),
            ValueError,
            "got decay=nan",
        ),
        (
            lambda: F.update_router_bias(torch.zeros(4).long(), torch.ones(4).long()),
            TypeError,
            "bias must be float64",
        ),
        (
            lambda: F.update_router_bias(torch.zeros(4), torch.ones(4)),
            TypeError,
            r"counts must be integers, got counts.dtype=torch.float32",
        ),
        (
            lambda: F.update_router_bias(torch.zeros(4), torch.ones(4, device="meta").long()),
            ValueError,
            "counts must be on the device of bias, got counts.device=meta",
        ),
        (
            lambda: F.update_router_bias(torch.zeros(4), torch.ones(4).long(), math.inf),
            ValueError,
            "rate must be a finite number, got rate=inf",
        ),
        (lambda: F.expert_counts(torch.ones(4), 3), TypeError, "index must be integers"),
        (
            lambda: F.expert_counts(torch.ones(4).long(), -1),
            ValueError,
            "experts must be an int >= 1, got experts=-1",
        ),
        (
            lambda: F.load_balance_loss(torch.ones(2, 4), torch.zeros(2, 1)),
            TypeError,
            "index must be integers",
        ),
        (
            lambda: F.load_balance_loss(
                torch.ones(2, 4), torch.zeros(2, 1).long(), token_mask=torch.ones(2)
            ),
            TypeError,
            "token_mask must be a bool tensor, got torch.float32",
        ),
        (
            lambda: F.load_balance_loss(torch.ones(2, 4), torch.zeros(2, 1, device="meta").long()),
            ValueError,
            "index must be on the device of scores",
        ),
        (
            lambda: F.noisy_top_k(torch.ones(2, 4), torch.ones(2, 4).double(), 1),
            TypeError,
            "noise_logits must have the dtype of logits",
        ),
        (
            lambda: F.noisy_top_k(torch.ones(2, 4), torch.ones(2, 4), 1, noise_eps=math.nan),
            ValueError,
            "noise_eps must be a finite number >= 0, got noise_eps=nan",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
