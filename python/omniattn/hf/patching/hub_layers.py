"""This package's layers under the names that the `kernels` package uses.

transformers marks layers with `use_kernel_forward_from_hub(name)`, and `kernels.kernelize` replaces
the forwards of layers whose names are in a mapping. The mapping here needs no download: its entries
have the forwards of layers.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from omniattn.hf.common.probe import Forward
from omniattn.hf.patching import layers

__all__ = ["LocalLayer", "kernel_mapping"]


#: Layer name -> (forward, True if torch.compile can trace it).
FORWARDS: dict[str, tuple[Forward, bool]] = {
    "RMSNorm": (layers.rms_norm_llama, True),  # 140 models
    "RMSNormZeroCentered": (layers.rms_norm_gemma, True),  # Qwen3.5
    "RMSNormGated": (layers.rms_norm_gated, True),
    # transformers does not mark it: kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP").
    "SwiGLUMLP": (layers.glu_mlp, True),
    "MegaBlocksMoeMLP": (layers.gpt_oss_moe, False),  # calls the model's own router
    "SoftmaxTopKRouter": (layers.softmax_top_k, True),
}


@dataclass(frozen=True)
class LocalLayer:
    """Provides a layer as `kernels` expects of a repository: `load` returns the class.

    Args:
        layer: class whose forward accepts transformers' modules as self.
    """

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        """Returns the layer class."""
        return self.layer

    def __str__(self) -> str:
        return f"omniattn {self.layer.__name__}"


def kernel_mapping() -> dict[str, Any]:
    """Returns layer name -> device -> this package's layer, for `kernels.use_kernel_mapping`.

    RMSNorm, RMSNormZeroCentered, RMSNormGated, MegaBlocksMoeMLP and SoftmaxTopKRouter are names
    that transformers uses; SwiGLUMLP is for classes that a user marks. Rotary functions are missing
    since one name stands for several formulas; :func:`omniattn.hf.patch` probes each.

    Note:
        gpt-oss, OLMo 2, Nemotron-H, DeepSeek-V4 and some others also use "RMSNorm" for norms that
        round only once: in half precision they differ from this layer by one rounding.

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
