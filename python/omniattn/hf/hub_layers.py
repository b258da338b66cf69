"""This package's layers behind the layer names of the `kernels` package.

transformers marks layers with `use_kernel_forward_from_hub(name)`; `kernels.kernelize` gives those
whose name is in a mapping another forward. The mapping here needs no download and no build folder:
its entries are the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from omniattn import functional
from omniattn.hf import layers
from omniattn.hf.experts import experts_forward

__all__ = ["LocalLayer", "kernel_mapping"]


class RMSNorm(nn.Module):
    """Norms with `weight` and `variance_epsilon`, rounded as Llama's: 140 models' "RMSNorm"."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        y: Tensor = layers.rms_norm_llama(self, hidden_states)
        return y


class RMSNormZeroCentered(nn.Module):
    """Norms with the factor 1 + `weight` and `eps`, rounded once: Gemma's form, in Qwen3.5."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        y: Tensor = layers.rms_norm_gemma(self, x)
        return y


class RMSNormGated(nn.Module):
    """Norms with a gate behind them: SiLU, rounded as Qwen3-Next's, or sigmoid, rounded once as
    Kimi Linear's."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """(..., d), (..., d) -> (..., d)."""
        return functional.rms_norm_gated(
            hidden_states,
            gate,
            self.weight,
            eps=self.variance_epsilon,
            activation=self.activation,
            casting="fp32" if self.activation == "sigmoid" else "llama",
        )


class SwiGLUMLP(nn.Module):
    """Llama's feed-forward layer, which transformers leaves unmarked: mark it by
    `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")`."""

    can_torch_compile = True
    has_backward = True

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        if not all(map(_is_plain, projections)):
            y: Tensor = layers.swiglu_mlp(self, x)
            return y
        return functional.glu_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            gate_bias=self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
        )


def _is_plain(linear: nn.Module) -> bool:
    """Whether a linear is no more than its weight and bias: no adapter (PEFT), hook, quantised or
    sharded weight, of which only a call would know."""
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and not linear._backward_hooks
        and not linear._backward_pre_hooks
        and not hasattr(type(linear.weight), "__tensor_flatten__")
    )


class MegaBlocksMoeMLP(nn.Module):
    """gpt-oss's router and experts: biases, interleaved weights, clamped activation."""

    can_torch_compile = False  # the router is the model's own
    has_backward = True

    router: nn.Module
    experts: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, d) -> (B, T, d) and the weights (B T, k)."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.router(flat)
        y = experts_forward(self.experts, flat, index, weights)
        return y.view(hidden_states.shape), weights


class SoftmaxTopKRouter(nn.Module):
    """Routers that renormalise the best of a softmax; equal scores go to the smaller expert."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., d) -> logits (N, E), weights and experts (N, k)."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(flat, self.weight)
        routing = functional.softmax_top_k(logits, self.top_k, renormalize=True)
        return logits, routing.weights.to(logits.dtype), routing.experts


@dataclass(frozen=True)
class LocalLayer:
    """What `kernels` expects of a repository: `load` gives the layer.

    Args:
        layer: a class whose forward runs on the modules of transformers.
    """

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        """The layer."""
        return self.layer

    def __str__(self) -> str:
        return f"omniattn {self.layer.__name__}"


def kernel_mapping() -> dict[str, Any]:
    """Layer names -> device -> this package's layer, for `kernels.use_kernel_mapping`.

    RMSNorm, RMSNormZeroCentered, RMSNormGated, MegaBlocksMoeMLP and SoftmaxTopKRouter are names
    that transformers uses; SwiGLUMLP is for classes that a user marks. Rotary functions are not
    among them: one name stands for several formulas. :func:`omniattn.hf.patch` probes each.

    Note:
        gpt-oss, OLMo 2, Nemotron-H, DeepSeek-V4 and some others mark norms that round once as
        "RMSNorm", too: in half precision those differ by a rounding from the layer here.

    Example:
        >>> sorted(kernel_mapping()["RMSNorm"])
        ['cpu', 'cuda']

        With the `kernels` package: ``with kernels.use_kernel_mapping(kernel_mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")``
    """
    layers = (
        RMSNorm,
        RMSNormZeroCentered,
        RMSNormGated,
        SwiGLUMLP,
        MegaBlocksMoeMLP,
        SoftmaxTopKRouter,
    )
    devices = ("cpu", "cuda")
    return {layer.__name__: {device: LocalLayer(layer) for device in devices} for layer in layers}
