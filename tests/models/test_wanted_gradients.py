"""Frozen parameters: any subset of wanted gradients equals all, in every model and layer.

Two sequences of 133 tokens (of 37 in models) are past the buffers of the kernels. Ops give equal
bits (tests/ops/test_specs.py), but torch's products depend on what needs a gradient.
"""

import copy
import inspect
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from small_layers import LAYERS, OTHERS, valid_config
from small_presets import SMALL
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from omniattn import modules
from omniattn.functional import Routing
from omniattn.models import ModelConfig, SwinConfig, T5Config, ViTConfig
from omniattn.models.presets import TRAINED
from omniattn.modules import RotaryEmbedding
from omniattn.testing.wanted import subsets

BATCH, TOKENS = 2, 133
PRESETS = {**TRAINED, **{f"{name}-small": config for name, config in SMALL.items()}}
del PRESETS["llama-medium"]  # takes as long as ten others and has no layer of its own
#: Layers without gradients, or of models that are presets.
WITHOUT = {
    *("RotaryEmbedding", "SinCosPositional2d", "SinusoidalPositional"),
    *("MultiTokenPredictor", "T5RelativeBias"),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rotated() -> dict[str, Any]:
    """For layers that rotate two features."""
    return {"x": random(BATCH, TOKENS, 8), "rope": RotaryEmbedding(2)(torch.arange(TOKENS))}


def grid(*shape: int) -> dict[str, Any]:
    return {"x": random(BATCH, *shape, 8)}


#: Arguments of layers that take more than x (B, T, 8).
ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(("DeepSeekSparseAttention", "MultiHeadLatentAttention"), rotated),
    "ALiBi": lambda: {"q_len": 70, "k_len": TOKENS},
    "DisentangledAttention": lambda: {
        "x": random(BATCH, TOKENS, 8),
        "positions": random(1024, 8),
    },
    "Experts": lambda: {
        "x": random(BATCH * TOKENS, 8),
        "routing": Routing(
            torch.arange(2 * BATCH * TOKENS).view(-1, 2) % 4,
            random(BATCH * TOKENS, 2).sigmoid(),
            random(BATCH * TOKENS, 4),
        ),
    },
    "LearnedPositional": lambda: {"x": random(BATCH, 4, 8)},
    "MultiheadAttention": lambda: {n: random(TOKENS, BATCH, 8) for n in ("query", "key", "value")},
    "NeighborhoodAttention2D": lambda: grid(9, 15),
    "NeighborhoodAttention3D": lambda: grid(4, 5, 7),
    "PatchMerging": lambda: grid(14, 14),
    "RMSNormGated": lambda: {n: random(BATCH, TOKENS, 8) for n in ("x", "gate")},
    "SpatialReductionAttention": lambda: grid(12, 12),
    "SwinBlock": lambda: grid(14, 14),
    "WindowAttention": lambda: grid(14, 14),
}


class Calls:
    """A module with arguments, called with other parts of it frozen each time."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self.module, self.arguments = module, arguments
        self.names = [name for name, _ in module.named_parameters()]
        self.names += [n for n, t in arguments.items() if _is_float(t)]

    def gradients(self, wanted: Iterable[str]) -> dict[str, Tensor | None]:
        """Returns gradients, by name, of a fixed random function of all outputs; dropout and
        routers draw the same numbers in each call."""
        module, wanted = copy.deepcopy(self.module), list(wanted)
        arguments = {n: t.clone() if _is_float(t) else t for n, t in self.arguments.items()}
        leaves = {**arguments, **dict(module.named_parameters())}
        for name in self.names:
            leaves[name].requires_grad_(name in wanted)
        torch.manual_seed(0)
        found = tree_leaves(module(**arguments))
        outputs = [t for t in found if _is_float(t) and t.requires_grad]
        inputs = [leaves[name] for name in wanted]
        grads = [random(*t.shape).to(t) for t in outputs]
        each = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        return dict(zip(wanted, each, strict=True))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def check(calls: Calls, choices: Iterable[tuple[str, ...]]) -> None:
    every = calls.gradients(calls.names)
    largest = max(float(g.abs().max()) for g in every.values() if g is not None and g.numel())
    used = [name for name, gradient in every.items() if gradient is not None]
    for wanted in choices:
        wanted = tuple(name for name in wanted if name in used)
        for name, gradient in calls.gradients(wanted).items() if wanted else ():
            assert gradient is not None, f"{name}: no gradient where {wanted} are wanted"
            what = f"{name} of {wanted}: {{}}".format
            torch.testing.assert_close(
                gradient, every[name], rtol=0, atol=1e-5 * largest, equal_nan=False, msg=what
            )


def few(names: list[str], seed: str) -> list[tuple[str, ...]]:
    """The first parameters alone, as of adapters before frozen layers; all but one; two halves."""
    draw = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    chosen = (torch.rand(len(names), generator=draw) < 0.5).tolist()
    half = tuple(n for n, c in zip(names, chosen, strict=True) if c)
    rest = tuple(n for n in names if n not in half)
    left_out = names[int(torch.randint(len(names), (1,), generator=draw))]
    return [(names[0],), tuple(n for n in names if n != left_out), half, rest]


def inputs_of(config: ModelConfig) -> list[Tensor]:
    if isinstance(config, ViTConfig | SwinConfig):
        return [random(BATCH, config.channels, config.image, config.image)]
    tokens = torch.arange(BATCH * 37).view(BATCH, -1) % 90
    return [tokens, tokens[:, :33]] if isinstance(config, T5Config) else [tokens]


def model(name: str) -> Calls:
    torch.manual_seed(0)
    built = PRESETS[name].build()
    names = inspect.signature(built.forward).parameters
    return Calls(built, dict(zip(names, inputs_of(PRESETS[name]), strict=False)))


def layer(name: str) -> Calls:
    torch.manual_seed(0)
    built = getattr(modules, name)(valid_config(name), **OTHERS.get(name, {}))
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    make = ARGUMENTS.get(name, lambda: {"x": random(BATCH, TOKENS, 8)})
    return Calls(built, make())


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in WITHOUT])
def test_layers(name, one_thread):
    calls = layer(name)
    check(calls, subsets(calls.names, name))


@pytest.mark.parametrize("shape", [(0, 5, 8), (BATCH, 0, 8), (BATCH, 1, 8)], ids=str)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in {*WITHOUT, *ARGUMENTS}])
def test_layers_of_few_tokens(name, shape, one_thread):
    """All parameters have gradients, which are zeros where there are no tokens."""
    calls = layer(name)
    used = [name for name, gradient in calls.gradients(calls.names).items() if gradient is not None]
    calls.arguments["x"] = random(*shape)
    for name, gradient in calls.gradients(used).items():
        assert gradient is not None, f"{name}: no gradient"
        assert gradient.isfinite().all() and (shape[1] > 0 or not gradient.any())


@pytest.mark.parametrize("name", PRESETS)
def test_models(name, one_thread):
    calls = model(name)
    check(calls, few(calls.names, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_subset_of_models(name, one_thread):
    calls = model(name)
    check(calls, subsets(calls.names, name, drawn=10))
