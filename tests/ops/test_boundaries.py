"""Boundaries of packed sequences: no function leaves tokens out in silence, and no kernel."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omniattn import compat, functional, testing
from omniattn.functional import masks

#: The first case of each op with boundaries of some name.
PACKED = {
    f"{spec.name}-{name}": (spec, case, name)
    for spec in testing.registry().values()
    for case in reversed(spec.cases)
    for name in spec.call(case, torch.float32).tensors
    if name.startswith("cu_seqlens")
}


class Unread(TorchDispatchMode):
    """Values are read by kernels alone, as in a compiled call."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **kwargs or {})


def narrowed(name: str, at: int) -> tuple:
    """A call with boundaries that leave the first or the last token out, and the token."""
    spec, case, boundaries = PACKED[name]
    call = spec.call(case, torch.float32)
    cu, total = call.tensors[boundaries].clone(), int(call.tensors[boundaries][-1])
    cu = cu.clamp(min=1) if at == 0 else cu.clamp(max=total - 1)
    alone = {key: cu if t is call.tensors[boundaries] else t for key, t in call.tensors.items()}
    return spec, alone, case.options, 0 if at == 0 else total - 1


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", PACKED)
def test_tokens_that_are_left_out_are_named(name, at, backend):
    spec, tensors, options, missed = narrowed(name, at)
    message = rf"^{spec.name}: cu_seqlens\w* must grow from 0 to .* without \w+ {missed}$"
    with pytest.raises(ValueError, match=message):
        spec.public(**tensors, **options, **({"backend": backend} if spec.chooses else {}))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", PACKED)
def test_kernels_and_definitions_refuse_boundaries_that_leave_tokens_out(name, at, backend):
    spec, tensors, options, _ = narrowed(name, at)
    with Unread(), pytest.raises(RuntimeError, match=r"must grow .*from 0 to the"):
        spec.public(**tensors, **options, **({"backend": backend} if spec.chooses else {}))


def packed_attention(x, cu, **options):
    return functional.attention_varlen(x, x, x, cu, cu, **options)


def packed_conv(x, cu, **options):
    return functional.causal_conv1d(x.flatten(1)[None], x.new_ones(3, 4), cu_seqlens=cu, **options)


@pytest.mark.parametrize("ends", [[0, 3, 9], [3, 10], [0, 7, 3, 10]])
@pytest.mark.parametrize("function", [packed_attention, packed_conv])
def test_definitions_refuse_them_in_graphs_derivatives_and_vmap(function, ends):
    x, cu = torch.randn(10, 1, 3), torch.tensor(ends)

    def defined(x, cu=cu):
        return function(x, cu, backend="reference")

    calls = (
        lambda: torch.compile(defined, backend="eager")(x, cu),
        lambda: torch.func.jvp(lambda x: function(x, cu), (x,), (x,)),
        lambda: torch.func.grad(lambda x: defined(x).sum())(x),
        lambda: torch.func.vmap(defined, in_dims=(1, None))(x[:, None], cu),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"must grow from 0 to the"):
            call()


def test_definitions_refuse_boundaries_of_one_entry_of_a_batch():
    x, cu = torch.randn(10, 1, 3), torch.tensor([[0, 0], [3, 4], [10, 9]])

    def convolved(cu):
        return packed_conv(x, cu, backend="reference")

    with pytest.raises(RuntimeError, match=r"must grow from 0 to the"):
        torch.func.vmap(convolved, in_dims=1)(cu)
    torch.func.vmap(convolved, in_dims=1)(cu.clamp(max=9) + (cu >= 9))


def test_covers_all_functions_with_boundaries():
    functions = {name: getattr(functional, name) for name in functional.__all__}
    wanted = {
        f"{name}-{parameter}"
        for name, function in functions.items()
        if inspect.isroutine(function) and name != "packed_positions"
        for parameter in inspect.signature(function).parameters
        if parameter.startswith("cu_seqlens")
    }
    # Compositions, which have no spec.
    assert wanted == {*PACKED, "ngram_hashes-cu_seqlens"}


X = torch.ones(10, 3)
NGRAMS = torch.ones(1, 10).long(), torch.ones(2).long(), torch.ones(1, 1).long()  # of two tokens


@pytest.mark.parametrize(("ends", "missed"), [([0, 3, 9], "9"), ([3, 10], "0 to 2")])
@pytest.mark.parametrize(
    "call",
    [
        lambda cu: functional.packed_positions(cu, 10),
        lambda cu: functional.ngram_hashes(*NGRAMS, cu_seqlens=cu),
        lambda cu: masks.Documents.from_cu_seqlens(cu, 10),
        lambda cu: compat.causal_conv1d_varlen_states(X, cu, 2),
        lambda cu: compat.chunk_gla(*[-X.view(1, 10, 1, 3)] * 4, cu_seqlens=cu),
    ],
    ids=[
        *("packed_positions", "ngram_hashes", "Documents"),
        *("causal_conv1d_varlen_states", "chunk_gla"),
    ],
)
def test_functions_without_a_spec(call, ends, missed):
    with pytest.raises(
        ValueError, match=f"cu_seqlens must grow from 0 to .* without tokens? {missed}$"
    ):
        call(torch.tensor(ends))


def test_documents_of_boundaries_start_at_zero():
    with pytest.raises(ValueError, match="Documents: cu_seqlens must grow from 0"):
        masks.Documents.from_cu_seqlens(torch.tensor([3, 10]))


def keys_of_a_cache(x, lengths):
    x = x.view(2, 5, 1, 3)
    return functional.attention_cached(x, x, x, lengths, causal=True, backend="reference")


def experts(x, index):
    up, down = torch.ones(4, 6, 3), torch.ones(4, 3, 3)
    weights = torch.ones(index.shape)
    return functional.moe_experts(x[:, 0], index, weights, up, down, backend="reference")


class Defined(torch.nn.Module):
    """A function of two tensors, for torch.export."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, numbers):
        return self.function(x, numbers)


@pytest.mark.parametrize(
    ("function", "numbers", "wrong"),
    [
        (lambda x, cu: packed_attention(x, cu, causal=True, backend="reference"), [0, 4, 10], 9),
        (keys_of_a_cache, [3, 5], 6),
        (experts, [[0, 3]] * 10, 4),
    ],
    ids=["attention_varlen", "attention_cached", "moe_experts"],
)
def test_definitions_that_read_values_are_exported_and_compiled(function, numbers, wrong):
    call = torch.randn(10, 1, 3), torch.tensor(numbers)
    want, outside = function(*call), call[1].clone()
    outside.view(-1)[-1] = wrong
    program = torch.export.export(Defined(function), call).module()
    for graph in (program, torch.compile(function, dynamic=True, backend="eager")):
        torch.testing.assert_close(graph(*call), want)
        with pytest.raises(RuntimeError, match=r"must (grow from 0 to|lie in|be in)"):
            graph(call[0], outside)
