"""Switch and GShard: T5 with mixtures of experts in every other layer, or in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.models.encoder_decoders.t5 import DECODER_LAYERS, HF_OPTIONS, HF_WEIGHTS, T5Config
from omniattn.models.hf import Conversion, Counterpart, Renames
from omniattn.modules import MoE
from omniattn.modules.base.fields import Size
from omniattn.modules.base.layer import LayerConfig


def _plain_experts(ours: SwitchTransformerConfig) -> dict[str, Any]:
    for name, wanted in (("gated", False), ("top_k", 1), ("capacity_factor", None)):
        if (value := getattr(ours, name)) != wanted:
            raise NotImplementedError(
                f"SwitchTransformerConfig: {name} must be {wanted!r} in transformers, "
                f"got {name}={shown(value)}"
            )
    return {
        "num_sparse_encoder_layers": ours.num_layers // ours.expert_period,
        "num_sparse_decoder_layers": ours.depth(decoder=True) // ours.expert_period,
    }


def _experts_from_hf(theirs: Any) -> dict[str, Any]:
    return {"expert_period": theirs.encoder_sparse_step, "capacity_factor": None}


def _each_expert(ours: SwitchTransformerConfig) -> Renames:
    """Names the weights of experts, which transformers keeps apart."""
    every = ",".join(f"expert_{i}" for i in range(ours.experts))
    return (
        (r"experts\.gate_up_proj", f"experts.{{{every}}}.wi.weight"),
        (r"experts\.down_proj", f"experts.{{{every}}}.wo.weight"),
    )


@dataclass(frozen=True)
class SwitchTransformerConfig(T5Config):
    """Config of a Switch Transformer, or with `top_k=2` of a GShard.

    Some layers have `experts` MLPs of size `hidden_dim`, of which each token uses `top_k`, weighted
    by their probabilities; these are renormalised where a token uses more than one. The hidden
    layers of experts have no dropout, and GShard's second expert is never left out at random.

    Args:
        experts, top_k: number of experts of a layer, and of experts of a token.
        expert_period: distance of layers with experts: 2 for every other one from the second on, 1
            for all.
        capacity_factor: most tokens of an expert in training, as a multiple of an even share of the
            batch, or None.
        capacity: most tokens of an expert in a sequence, also in evaluation, as in transformers, or
            None.
        jitter: the router's inputs in training are multiplied by uniform factors of at most this
            distance from 1.
        balance_coefficient, z_coefficient: coefficients of the router's losses, see
            :class:`Routers`.

    Reference:
        Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961; Lepikhin et al.,
        "GShard", 2020, arXiv 2006.16668.
    """

    architecture = "switch-transformer"
    hf = Counterpart(
        "SwitchTransformersForConditionalGeneration",
        HF_OPTIONS
        | {
            "experts": "num_experts",
            "capacity": "expert_capacity",
            "jitter": "router_jitter_noise",
            "balance_coefficient": "router_aux_loss_coef",
            "z_coefficient": "router_z_loss_coef",
        },
        (*HF_WEIGHTS, (r"mlp\.gate", "mlp.router.classifier"), (r"down_proj", "wo")),
        fixed={
            "num_decoder_layers": lambda c: c.depth(decoder=True),
            "encoder_sparse_step": lambda c: c.expert_period,
            "decoder_sparse_step": lambda c: c.expert_period,
            "dense_act_fn": "relu",
            "router_bias": False,
            "tie_word_embeddings": True,
        },
        conversions=(Conversion(_plain_experts, _experts_from_hf), DECODER_LAYERS),
        layer_weights=_each_expert,
    )

    experts: Size = 8
    top_k: Size = 1
    expert_period: Size = 2
    capacity_factor: float | None = 1.25
    capacity: Size | None = None
    jitter: float = 1e-2
    balance_coefficient: float = 1e-2
    z_coefficient: float = 0.0

    def feed_forward(self, layer: int, *, decoder: bool) -> LayerConfig:
        if layer % self.expert_period != 1 % self.expert_period:
            return super().feed_forward(layer, decoder=decoder)
        return MoE.Config.of(
            self.dim,
            self.hidden_dim,
            self.experts,
            self.top_k,
            activation="geglu_tanh" if self.gated else "relu",
            renormalize=self.top_k > 1,
            jitter=self.jitter,
            capacity_factor=self.capacity_factor,
            capacity=self.capacity,
            capacity_per_sequence=self.capacity is not None,
            capacity_at_eval=self.capacity is not None,
            balance_coefficient=self.balance_coefficient,
            z_coefficient=self.z_coefficient,
            init_std=self.dim**-0.5,
            out_init_std=self.hidden_dim**-0.5,
            backend=self.backend,
        )
