"""torch.jit.trace of layers and models in training: values and gradients, also of other inputs.

The trace is made with its own check, which traces again without gradients and compares the graphs.

A program must hold ops. Python functions, which autograd calls for eager calls, would keep the
inputs of the trace as constants, and could not be saved.
"""

import io

import pytest
import torch
from small_calls import PRESETS, TRAINABLE, is_float, layer_call, model_call
from torch import nn
from torch.utils._pytree import tree_leaves

#: Layers and models whose parameters are terms of complex numbers.
COMPLEX = {"S4": "s4: Lambda", "S4D": "s4d: A", "s4d": "s4d: A"}
#: Models with experts, groups of experts, two kinds of mixers, and an encoder.
FEW = ("llama-tiny", "mixtral-small", "deepseek-small", "mamba2-small", "zamba2-small", "t5-small")

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


class Outputs(nn.Module):
    """The tensors that a module returns, as a tuple, from the values of some arguments."""

    def __init__(self, module, arguments, names):
        super().__init__()
        self.module, self.arguments, self.names = module, arguments, names

    def forward(self, *values):
        found = self.module(**{**self.arguments, **dict(zip(self.names, values, strict=True))})
        return tuple(t for t in tree_leaves(found) if isinstance(t, torch.Tensor))


def seeded(module, inputs):
    """Outputs with the same dropout and noise each time."""
    torch.manual_seed(0)
    outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients(module, inputs, parameters):
    outputs = [t for t in seeded(module, inputs) if t.requires_grad]
    grads = [torch.randn_like(t) for t in outputs]
    found = torch.autograd.grad(outputs, parameters, grads, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def check_trace(module, inputs, others):
    """Traces the module; runs the program often enough for TorchScript to optimize it."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, inputs), file)
    file.seek(0)
    program = torch.jit.load(file)
    named, loaded = (dict(m.named_parameters()) for m in (module, program))
    assert set(loaded) <= set(named)
    wanted = gradients(module, others, [named[name] for name in loaded])
    for _ in range(3):
        torch.testing.assert_close(seeded(program, others), seeded(module, others))
        torch.manual_seed(0)
        found = gradients(program, others, list(loaded.values()))
        largest = max(float(g.abs().max()) for g in wanted if g.numel())
        for name, actual, expected in zip(loaded, found, wanted, strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-4, atol=1e-5 * largest, msg=f"{name}: {{}}".format
            )


@pytest.mark.parametrize("name", [name for name in TRAINABLE if name != "ALiBi"])
def test_layers(name, one_thread):
    layer, arguments = layer_call(name)
    names = [n for n, value in arguments.items() if is_float(value)]
    inputs = tuple(arguments[n] for n in names)
    module = Outputs(layer, arguments, names)
    if name in COMPLEX:
        refuses_a_trace(module, inputs, COMPLEX[name])
    elif name == "MixtureOfMemories":
        with pytest.raises(NotImplementedError, match=f"^{name}: x must not .*torch.jit.trace"):
            torch.jit.trace(module, inputs, check_trace=False)
    else:
        check_trace(module, inputs, tuple(0.7 * t + 0.1 for t in inputs))


def check_model(name):
    model, inputs = model_call(name)
    module = Outputs(model, {}, list(inputs))
    if name in COMPLEX:
        refuses_a_trace(module, tuple(inputs.values()), COMPLEX[name])
    else:
        check_trace(module, tuple(inputs.values()), tuple(t.flip(0) for t in inputs.values()))
        torch.jit.trace(module.eval(), tuple(inputs.values()))


def refuses_a_trace(module, inputs, names):
    """TorchScript has derivatives of real numbers only."""
    with pytest.raises(NotImplementedError, match=f"^{names} must not .* under torch.jit.trace"):
        torch.jit.trace(module, inputs, check_trace=False)
    with torch.no_grad():
        program = torch.jit.trace(module, inputs, check_trace=False)
        other = tuple(2 * t if is_float(t) else t.flip(0) for t in inputs)
        torch.testing.assert_close(seeded(program, other), seeded(module, other))


@pytest.mark.parametrize("name", FEW)
def test_models(name, one_thread):
    check_model(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in FEW])
def test_all_models(name, one_thread):
    check_model(name)
