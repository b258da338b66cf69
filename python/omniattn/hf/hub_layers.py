"""This package's layers under the layer names of the `kernels` package.

transformers marks layers with `use_kernel_forward_from_hub(name)`; `kernels.kernelize` gives those
whose name is in a mapping another forward. The mapping here needs no download and no build folder:
its entries have the forwards of layers.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from omniattn.hf import layers
from omniattn.hf.probe import Forward

__all__ = ["LocalLayer", "kernel_mapping"]


#: Layer names: the forward, and whether torch.compile may trace it.
FORWARDS: dict[str, tuple[Forward, bool]] = {
    "RMSNorm": (layers.rms_norm_llama, True),  # of 140 models
    "RMSNormZeroCentered": (layers.rms_norm_gemma, True),  # Qwen3.5's
    "RMSNormGated": (layers.rms_norm_gated, True),
    # Not marked by transformers: kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP").
    "SwiGLUMLP": (layers.glu_mlp, True),
    "MegaBlocksMoeMLP": (layers.gpt_oss_moe, False),  # the router is the model's own
    "SoftmaxTopKRouter": (layers.softmax_top_k, True),
}


@dataclass(frozen=True)
class LocalLayer:
    """Layer in the form that `kernels` expects of a repository: `load` returns the class.

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
    devices = ("cpu", "cuda")
    return {name: {device: LocalLayer(_layer(name)) for device in devices} for name in FORWARDS}


@functools.cache
def _layer(name: str) -> type[nn.Module]:
    forward, traced = FORWARDS[name]
    body = {"forward": forward, "can_torch_compile": traced, "has_backward": True}
    return type(name, (nn.Module,), {**body, "__module__": __name__})
