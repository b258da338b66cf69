"""Small problems are left to vectors. test_emulated_isas.py runs this file on software tiles."""

import math

import pytest
import torch
from tile_cases import ON_TILES, VECTORS, by_experts, experts, gradients

from omniattn import config, testing
from omniattn.functional import attention_varlen, selected_attention
from omniattn.ops.dispatch import level_choice
from omniattn.ops.dispatch.cpu import cpu_family


@pytest.fixture
def use_tiles_from():
    """Sets the multiply-adds from which an op uses tiles."""

    def use(op, madds):
        least = {"avx512_bf16": level_choice.NEVER, "amx_bf16": madds, "amx_fp16": madds}
        for level, number in least.items():
            numbers = level_choice.OPS.index(op), config.CPU_ISAS.index(level)
            assert torch.ops.omniattn.set_least_madds(*numbers, number)

    yield use
    level_choice.install(level_choice.record_of(cpu_family()))


#: Whether tiles multiply a type.
TILES_OF = {torch.bfloat16: ON_TILES, torch.float16: "amx_fp16" in testing.isas()}
half_types = pytest.mark.parametrize("dtype", TILES_OF, ids=str)


@half_types
def test_each_sequence_runs_on_the_level_of_its_size(use_tiles_from, dtype):
    lengths = (24, 130)  # 7e4 and 2e6 multiply-adds of a head
    ends = torch.tensor([0, 24, 154])
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(154, 2, 64, generator=generator).to(dtype) for _ in "qkv"]

    def results():
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = attention_varlen(*leaves, ends, ends, max(lengths), max(lengths))
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    use_tiles_from("attention", 0)
    on_tiles = results()
    with testing.isa(VECTORS):
        below = results()
    use_tiles_from("attention", 10**6)
    for found, large, small in zip(results(), on_tiles, below, strict=True):
        assert torch.equal(found[:24], small[:24])
        assert torch.equal(found[24:], large[24:])
        assert torch.equal(small[:24], large[:24]) is not TILES_OF[dtype]


@half_types
def test_experts_run_on_the_level_of_their_size(use_tiles_from, dtype):
    tensors, index = experts()
    tensors = [t.to(dtype) for t in tensors]
    madds = math.ceil(40 / 3) * 2 * 48 * 70
    use_tiles_from("moe_experts", 0)
    on_tiles = gradients(by_experts, tensors, index)
    with testing.isa(VECTORS):
        below = gradients(by_experts, tensors, index)
    assert torch.equal(below[0], on_tiles[0]) is not TILES_OF[dtype]
    for least, expected in [(madds, on_tiles), (madds + 1, below)]:
        use_tiles_from("moe_experts", least)
        for found, right in zip(gradients(by_experts, tensors, index), expected, strict=True):
            assert torch.equal(found, right)


@half_types
@pytest.mark.parametrize(
    ("rows", "block_size", "vectors"),
    [(4, 1, True), (8, 1, False), (4, 16, True), (4, 32, False), (16, 16, False)],
)
def test_lists_of_few_rows_run_on_vectors(use_tiles_from, rows, block_size, vectors, dtype):
    """Unless blocks of many keys are packed for all lists."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 70, rows, 64, generator=generator).to(dtype)
    k, v = (torch.randn(1, 64, 1, 64, generator=generator).to(dtype) for _ in "kv")
    blocks = torch.randint(64 // block_size, (1, 1, 70, 2), generator=generator)

    def results():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        y = selected_attention(*leaves, blocks, block_size=block_size)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    use_tiles_from("attention", 0)
    found = results()
    with testing.isa(VECTORS):
        below = results()
    same = [torch.equal(a, b) for a, b in zip(found, below, strict=True)]
    assert all(same) if vectors or not TILES_OF[dtype] else not any(same)


@pytest.mark.parametrize(("op", "isa"), [(2, 0), (-1, 0), (0, 9), (0, -1)])
def test_numbers_that_are_no_op_and_no_level_are_refused(op, isa):
    assert not torch.ops.omniattn.set_least_madds(op, isa, 1)
