"""Numbers of parameters, total and active, by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from omniattn.calculate.sources import Source, config_of
from omniattn.calculate.trace import meta_model
from omniattn.models.model import Embedding
from omniattn.modules import Engram, LearnedPositional, MoE
from omniattn.modules.base.mixer import ChannelMixer, Mixer, Norm

#: Kinds of layers by the name of the part that they count to; the first that fits.
_KINDS: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("embeddings", (Embedding, LearnedPositional, Engram)),
    ("mixers", (Mixer,)),
    ("feed-forward", (ChannelMixer,)),
    ("norms", (Norm,)),
)
#: Parts of models by the name of their attribute.
_NAMED = {"lm_head": "head", "head": "head", "predictor": "predictor"}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Args:
        total: all parameters, a shared one counted once.
        active: parameters that one token reads: of the E experts of a layer, only its k, and of
            the rows of n-grams, only those of its hashes.
        parts: total by part: embeddings, mixers, feed-forward, norms, head, predictor, other.
    """

    total: int
    active: int
    parts: dict[str, int]


def parameters(config: Source) -> Parameters:
    """Counts the parameters of a model that is built on the meta device.

    ``active = total - sum over MoE layers of (1 - k / E) P_experts``.

    Args:
        config: a config, the name of a preset, or the path of a Hugging Face config.json.

    Example:
        >>> found = parameters("mixtral-8x7b")
        >>> found.total, found.active
        (46702792704, 12879925248)
    """
    model = meta_model(config_of(config))
    total = sum(p.numel() for p in model.parameters())
    idle = sum(_idle(module) for module in model.modules() if isinstance(module, (MoE, Engram)))
    parts: dict[str, int] = {}
    seen: set[int] = set()
    for part, parameter in _parts(model, "other"):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            parts[part] = parts.get(part, 0) + parameter.numel()
    return Parameters(total, total - idle, dict(sorted(parts.items(), key=lambda p: -p[1])))


def param_count(config: Source) -> int:
    """Returns the number of all parameters.

    Example:
        >>> param_count("gpt2-small")
        124439808
    """
    return parameters(config).total


def _idle(layer: MoE | Engram) -> int:
    """Returns the number of parameters of the experts or n-grams that a token does not choose."""
    if isinstance(layer, Engram):
        return layer.table.numel() - layer.sizes.numel() * layer.table.shape[1]
    c = layer.config
    held = sum(p.numel() for p in layer.experts.parameters())
    return held - held * min(c.gate.top_k, c.experts.experts) // c.experts.experts


def _parts(module: nn.Module, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters with the outermost part around them."""
    for parameter in module.parameters(recurse=False):
        yield part, parameter
    for name, child in module.named_children():
        inside = part
        if part == "other":
            kinds = (kind for kind, types in _KINDS if isinstance(child, types))
            inside = _NAMED.get(name) or next(kinds, part)
        yield from _parts(child, inside)
