"""Every registered op refuses what it cannot take, under the name of its public function."""

import functools
import itertools
import unittest.mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from omniattn import functional, testing
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch import precision as _precision

F32 = torch.float32


def f(*shape):
    return torch.ones(shape)


X, ROW = f(3, 4), f(4)
HEADS, U, WEIGHTS = f(2, 3, 4, 5), f(2, 4, 3), f(2, 4, 1, 5)
#: Arguments of the ops that only other ops or layers call.
INNER = {
    "activate": [(X, 2)],
    "activate_backward_": [(X.clone(), X, 2)],
    "causal_conv1d_": [(f(2, 1, 3), f(3, 4), f(3), f(2, 3, 3), True)],
    "mesa_step": [(f(2, 1, 3, 4), f(2, 1, 3, 4), f(2, 3, 4, 4), 2, 1e-6)],
    "attention_tangents": [
        (
            *(*[HEADS] * 4, None, HEADS, HEADS, None, HEADS, f(2, 4, 3), [], None, HEADS),
            *(f(2, 4, 3), f(2, 4, 3), [0, -1, 0, -1], [], [0.5, 0.0]),
        )
    ],
    "selective_scan_tangents": [
        (
            *(U, U, -f(3, 5), WEIGHTS, WEIGHTS, f(2, 3, 5), None, U, U, f(3, 5), WEIGHTS, WEIGHTS),
            *(f(2, 3, 5), U, f(2, 3, 5), U, f(2, 3, 5)),
        )
    ],
    "selective_scan_": [
        (
            *[f(2, 1, 3)] * 2,
            -f(3, 5),
            *[f(2, 1, 1, 5)] * 2,
            f(3),
            f(2, 1, 3),
            f(3),
            f(2, 3, 5),
            True,
        )
    ],
    "ssd_": [
        (
            *(f(2, 1, 4, 3), f(2, 1, 4), -f(4), f(2, 1, 2, 5), f(2, 1, 2, 5), f(4)),
            *(f(2, 1, 4, 3), f(4), f(2, 4, 3, 5), True, 0.0, 1.0),
        )
    ],
    "decayed_sum": [
        (
            *(f(2, 3, 2, 4), f(2, 3, 2, 5), f(2, 3, 2, 4), f(2, 3, 2), f(2, 3, 2, 5)),
            *(0, False, False),
        )
    ],
    "glu_backward_": [(X.clone(), X, X, 2, [], X.clone())],
}


class Calls(TorchDispatchMode):
    """Arguments that ops are called with: of each op the calls that bring a tensor where those
    before had none."""

    def __init__(self):
        super().__init__()
        self.arguments = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "omniattn":
            assert args, f"{op}: a call must ask the machine in Python, not by an op"
            name = op._schema.name.removeprefix("omniattn::").removesuffix("_raw")
            calls = self.arguments.setdefault(name, [])
            if set(tensors_of(args)).difference(*map(tensors_of, calls)):
                calls.append(tree_map_only(Tensor, torch.clone, args))
        return op(*args, **(kwargs or {}))


def tensors_of(args):
    """The places of the tensors."""
    return [at for at, value in enumerate(args) if isinstance(value, Tensor)]


@functools.cache
def taken():
    """By op, arguments that it takes: what the cases of the OpSpecs call it with."""
    # Machines with tiles ask more of the machine; here all do.
    with unittest.mock.patch.object(_precision, "_HAS_TILES", True), Calls() as calls:
        for spec in testing.registry().values():
            for case in spec.cases:
                call = spec.call(case, F32)
                with torch.no_grad():
                    call.run(spec.function)
                call.gradients(spec.function)
    return {**INNER, **tree_map_only(Tensor, torch.detach, calls.arguments)}


#: Arguments for which an op accepts any dtype, where only the shape counts, or a meta tensor, where
#: the other argument is a seed.
TAKES = {
    ("uniform_like", "x", "dtype"),
    ("uniform_like", "x", "device"),
    ("dropout", "x", "device"),
}


def ops():
    """Names of the registered ops on tensors, without the raw twin of each."""
    found = torch._C._dispatch_get_all_op_names()
    names = (n.removeprefix("omniattn::") for n in found if n.startswith("omniattn::"))
    return sorted(n for n in names if not n.endswith("_raw") and takes_tensors(n))


def takes_tensors(name):
    arguments = getattr(torch.ops.omniattn, name).default._schema.arguments
    return any("Tensor" in str(a.type) for a in arguments)


def with_raw(name):
    return [name, *([f"{name}_raw"] if hasattr(torch.ops.omniattn, f"{name}_raw") else [])]


def refusal(name, args):
    """The message with which an op refuses arguments, None if it takes them."""
    try:
        getattr(torch.ops.omniattn, name)(*args)
    except Exception as error:
        return str(error)
    return None


def check_name(name, args, message):
    public, _, rest = message.partition(": ")
    assert rest, message
    assert public.removesuffix("_backward").removesuffix("_tangents") in functional.__all__, message
    assert public == _library.public_name(name, args), message


def replaced(args, at, value):
    return (*args[:at], value, *args[at + 1 :])


def test_covers_all_ops():
    assert ops() == sorted(taken())


@pytest.mark.parametrize("name", ops())
def test_takes_the_arguments(name):
    assert [refusal(name, args) for args in taken()[name]] == [None] * len(taken()[name])


CHANGES = {
    "dtype": lambda t: t.to(torch.complex64),
    "shape": lambda t: t.new_zeros((*t.shape, 7)),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ops())
def test_names_the_public_function(name, change):
    schema = getattr(torch.ops.omniattn, name).default._schema.arguments
    for op, args in itertools.product(with_raw(name), taken()[name]):
        tensors = tensors_of(args)
        for at in tensors:
            given = replaced(args, at, CHANGES[change](args[at]))
            message = refusal(op, given)
            if message is not None:
                check_name(op, given, message)
            else:  # rows may have any shape, and the only tensor of a call any device
                free = change == "shape" or (change == "device" and len(tensors) == 1)
                assert free or (name, schema[at].name, change) in TAKES, schema[at].name


@pytest.mark.parametrize(
    "name,argument",
    [
        ("rwkv4", "w"),
        ("causal_conv1d", "weight"),
        ("selective_scan", "delta"),
        ("glu_mlp", "down_weight"),
    ],
)
def test_none_for_a_tensor(name, argument):
    schema = getattr(torch.ops.omniattn, name).default._schema.arguments
    at = [a.name for a in schema].index(argument)
    given = replaced(taken()[name][0], at, None)
    for op in with_raw(name):
        assert refusal(op, given).startswith(f"{name}: {argument} must be on the CPU")


def test_names_follow_from_the_arguments():
    centred = (X, ROW, ROW, True, 1e-5, 0.0, False)
    for name in ("norm", "norm_only"):
        given = replaced(centred, 1, f(5))
        assert refusal(name, given).startswith("layer_norm: weight must have shape (4,)")
    ungated = (X, None, f(5), ROW, 2, 0, 2, True, 1e-5, False)
    assert refusal("gated_norm", ungated).startswith("group_norm: weight must have shape (4,)")


def test_onnx_is_told_to_take_the_definition(monkeypatch):
    """The exporter runs the fakes, and would say that it knows no such op."""

    class Block(torch.nn.Module):
        def __init__(self, backend):
            super().__init__()
            self.backend = backend

        def forward(self, x):
            return functional.swiglu(
                functional.rms_norm(x, backend=self.backend), backend=self.backend
            )

    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    message = r'rms_norm: ONNX has no op for it; .* with backend="reference" of the function'
    with pytest.raises(NotImplementedError, match=message):
        torch.export.export(Block(None), (f(3, 4),))
    program = torch.export.export(Block("reference"), (f(3, 4),))
    assert not any("omniattn" in str(node.target) for node in program.graph.nodes)
