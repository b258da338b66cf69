"""Every registered op refuses what it cannot take, under the name of its public function."""

import pytest
import torch
from torch import Tensor

from omniattn import functional
from omniattn.ops import _library

F32, I64 = torch.float32, torch.int64


def f(*shape):
    return torch.ones(shape)


def i(*shape):
    return torch.zeros(shape, dtype=I64)


X, ROW, STATS = f(3, 4), f(4), f(3, 2)
NORM = (False, 1e-5, 0.0, False)
GATED = (2, 1, 2, False)
HEADS, COS = f(1, 3, 2, 4), f(3, 2)
ROTARY = (HEADS, HEADS, COS, COS, i(3), 0, False, False)
EXPERTS = (X, i(3, 2), f(3, 2), f(2, 10, 4), f(2, 10), f(2, 4, 5), f(2, 4))
MLP = (f(5, 4), f(5, 4), f(4, 5), f(5), f(5), f(4), i(2), 0.0, 2, False, True)
LSE = f(1, 2, 3)
NO_RULES, DROPOUT = ([], [], [0.5, 0.0]), ([], [], [0.5, 0.1])

#: Arguments that each op takes.
TAKEN = {
    "activate": (X, 2),
    "activate_backward_": (X.clone(), X, 2),
    "add_norm": (X, X, ROW, ROW, *NORM),
    "add_norm_only": (X, X, ROW, ROW, *NORM),
    "attention": (HEADS, HEADS, HEADS, [], i(2), *DROPOUT),
    "attention_only": (HEADS, HEADS, HEADS, [], i(2), *DROPOUT),
    "attention_backward": (
        *(HEADS, LSE, HEADS, HEADS, HEADS, [], i(2), HEADS, LSE, LSE, *DROPOUT, []),
    ),
    "attention_select": (HEADS, HEADS, [], *NO_RULES),
    "attention_weights": (HEADS, HEADS, LSE, [], *NO_RULES, False),
    "causal_conv1d": (f(2, 3, 4), f(4, 3), ROW, f(2, 4, 2), True),
    "causal_conv1d_backward": (
        *(f(2, 3, 4), f(4, 3), ROW, f(2, 4, 2), f(2, 3, 4), f(2, 4, 2)),
        *(True, True, True, True),
    ),
    "cross_entropy": (X, i(3), -100, 0.0, 0.0, 0.0, 1),
    "cross_entropy_backward": (f(), X, i(3), f(3), -100, 0.0, 0.0, 0.0, 1),
    "dropout": (X, i(2), 0.5),
    "gated_norm": (X, X, ROW, ROW, *GATED, 1e-5, False),
    "gated_norm_only": (X, X, ROW, ROW, *GATED, 1e-5, False),
    "gated_norm_backward": (X, X, X, ROW, ROW, f(3, 2, 2), *GATED, True, True),
    "glu": (X, X, 2),
    "glu_backward": (X, X, X, 2),
    "glu_backward_": (X.clone(), X, X, 2, X.clone()),
    "glu_mlp": (X, *MLP),
    "glu_mlp_backward": (X, f(3, 5), f(3, 5), [True] * 7 + [False], X, *MLP),
    "linear": (X, f(5, 4), f(5)),
    "linear_backward": (f(3, 5), X, f(5, 4), True, True, True),
    "linear_cross_entropy": (*(X, f(5, 4), f(5), i(3), -100, 0.0, 0.0, 0.0, 1, True, True, True),),
    "linear_cross_entropy_backward": (
        *(f(3), X, f(5, 4), f(5), i(3), -100, 0.0, 0.0, 0.0, True, True, True),
    ),
    "moe": (*EXPERTS, 2, 1, [], True),
    "moe_backward": (X, *EXPERTS, f(6, 10), 2, 1, [], *(True,) * 6),
    "norm": (X, ROW, ROW, *NORM),
    "norm_only": (X, ROW, ROW, *NORM),
    "norm_backward": (X, X, X, ROW, STATS, False, 0.0, True, True),
    "norm_rope": (HEADS, ROW, COS, COS, i(3), 0, False, 1e-5, 0.0, False),
    "norm_rope_backward": (HEADS, HEADS, ROW, COS, COS, i(3), f(1, 3, 2), 0, False, 0.0, True),
    "rope": ROTARY,
    "rope_": (HEADS.clone(), HEADS.clone(), *ROTARY[2:]),
    "top_k": (X, 2, X > 0),
    "uniform_like": (X, i(2)),
}

#: What an op may be given in an argument: any dtype where only the shape counts, a meta tensor
#: where the other one is a seed, biases that a backward does not read.
TAKES = {
    ("uniform_like", "x", "dtype"),
    ("uniform_like", "x", "device"),
    ("dropout", "x", "device"),
    *(("glu_mlp_backward", f"{of}_bias", "layout") for of in ("gate", "up", "down")),
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
    assert public.removesuffix("_backward") in functional.__all__, message
    if "mlp" not in name:  # made of other ops, which may refuse first
        assert public == _library.public_name(name, args), message


def replaced(args, at, value):
    return (*args[:at], value, *args[at + 1 :])


def test_covers_all_ops():
    assert ops() == sorted(TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_takes_the_arguments(name):
    assert refusal(name, TAKEN[name]) is None


CHANGES = {
    "dtype": lambda t: t.to(torch.complex64),
    "shape": lambda t: t.new_zeros((*t.shape, 7)),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TAKEN)
def test_names_the_public_function(name, change):
    args = TAKEN[name]
    schema = getattr(torch.ops.omniattn, name).default._schema.arguments
    tensors = [at for at, value in enumerate(args) if isinstance(value, Tensor)]
    for op in with_raw(name):
        for at in tensors:
            given = replaced(args, at, CHANGES[change](args[at]))
            message = refusal(op, given)
            if message is not None:
                check_name(op, given, message)
            else:  # rows may have any shape, and the only tensor of a call any device
                free = change == "shape" or (change == "device" and len(tensors) == 1)
                assert free or (name, schema[at].name, change) in TAKES, schema[at].name


def test_names_follow_from_the_arguments():
    centred = (X, ROW, ROW, True, 1e-5, 0.0, False)
    for name in ("norm", "norm_only"):
        given = replaced(centred, 1, f(5))
        assert refusal(name, given).startswith("layer_norm: weight must have shape (4,)")
    ungated = (X, None, f(5), ROW, 2, 0, 2, True, 1e-5, False)
    assert refusal("gated_norm", ungated).startswith("group_norm: weight must have shape (4,)")
