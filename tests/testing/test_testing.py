"""The checks themselves: each must fail on an op that breaks what it promises."""

import pytest
import torch

from omniattn import config, reference, testing
from omniattn.compat import liger
from omniattn.testing.properties import PROPERTIES
from omniattn.testing.spec import OpSpec
from omniattn.testing.table import replace_block

SPEC = testing.registry()["swiglu"]
CASE = SPEC.cases[5]


def scratch(gate, up=None):
    """Right, except that it adds what it finds in fresh memory."""
    return reference.swiglu(gate, up) + 0 * torch.empty_like(gate)


def one_scale(gate, up=None):
    """Reads a value, which a batch does not have."""
    return reference.swiglu(gate, up) * gate.detach().sum().item()


def neighbor(gate, up=None):
    """Right on dense tensors: reads the row as if it were contiguous."""
    y = reference.swiglu(gate, up)
    dense = gate.detach().as_strided(gate.shape, (gate.shape[-1], 1))
    return y + 0 * dense if gate.stride(-1) == 1 else y


def threaded(gate, up=None):
    return reference.swiglu(gate, up) * (1 + 1e-7 * torch.get_num_threads())


def slow_isa(gate, up=None):
    lowest = config.CPU_ISAS.index(testing.isas()[0])
    broken = torch.ops.omniattn.cpu_isa() == lowest
    return reference.swiglu(gate, up) * (1.1 if broken else 1)


def no_gradient(gate, up=None):
    return reference.swiglu(gate, up.detach() + 0 * up)


def graph_break(gate, up=None):
    torch._dynamo.graph_break()
    return reference.swiglu(gate, up)


@pytest.mark.parametrize(
    ("name", "broken", "error"),
    [
        ("forward", lambda gate, up=None: 1.001 * reference.swiglu(gate, up), "must be within"),
        ("backward", no_gradient, "gradient of up must be within"),
        ("gradcheck", no_gradient, "Jacobian mismatch"),
        ("strided", neighbor, "got inf"),
        ("poisoned", scratch, "bitwise the same"),
        ("deterministic", threaded, "bitwise the same"),
        ("every_isa", slow_isa, "must be within"),
        ("compiled", graph_break, "graph_break"),
        ("exported", reference.swiglu, "not an omniattn op"),
        ("mapped", one_scale, "item"),
    ],
)
def test_a_broken_op_is_found(name, broken, error, monkeypatch):
    monkeypatch.setattr(OpSpec, "function", property(lambda spec: broken))
    small = name == "gradcheck"  # a whole Jacobian
    case, dtype = (SPEC.case("pair"), torch.float64) if small else (CASE, torch.float32)
    with pytest.raises(Exception, match=error):
        PROPERTIES[name](SPEC, case, dtype)


@pytest.mark.parametrize("layout", [*testing.LAYOUTS, "far"])
def test_layouts_keep_the_values(layout):
    t = torch.randn(3, 4, 5)
    assert torch.equal(testing.relayout(t, layout), t)


def test_new_memory_is_poisoned():
    with testing.poisoned_memory():
        for size in (1, 10, 1000, 100_000, 5_000_000):
            blocks = [torch.empty(size) for _ in range(8)]
            assert (
                blocks[-1].isnan().all()
            )  # seven may come from a thread's cache, see the docstring


def test_isa_and_threads_are_restored():
    before = torch.ops.omniattn.cpu_isa(), torch.get_num_threads()
    for name in testing.isas():
        with testing.isa(name), testing.threads(3):
            assert torch.get_num_threads() == 3
    assert (torch.ops.omniattn.cpu_isa(), torch.get_num_threads()) == before
    with pytest.raises(ValueError, match="sse9"), testing.isa("sse9"):
        pass


def test_block_is_replaced_between_its_markers():
    text = "a\n<!-- t: begin -->\nold\n<!-- t: end -->\nb\n"
    assert replace_block(text, "t", "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="markers"):
        replace_block("a", "t", "new")


def test_every_name_of_the_variant_table_is_public():
    from omniattn import functional, modules, reference
    from omniattn.testing.registry import variants

    public = {*functional.__all__, *modules.__all__, *reference.__all__, *liger.__all__}
    public |= {*functional.masks.__all__, *functional.scores.__all__}
    assert {name for variant in variants() for name in variant.names} <= public
