"""Patched models under tensor parallelism of torch and of transformers, on two processes (gloo)."""

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from patched_models import SIZES
from processes import main, run, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import omniattn.hf

LAYER = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"vocab_size": 98})).train()


def parallelize(model, head):
    plan = {f"model.layers.*.{name}": how for name, how in LAYER.items()}
    if head:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def gathered(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def compare(parallel, model):
    """Loss, logits and gradients equal those of one process."""
    x = torch.arange(3, 37).view(2, 17)
    for skip_logits in (None, False):
        expected, actual = model(x, labels=x), parallel(x, labels=x, skip_logits=skip_logits)
        torch.testing.assert_close(actual.loss, expected.loss)
        if skip_logits is False:
            torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(expected.loss, list(model.parameters()))
        found = torch.autograd.grad(actual.loss, list(parallel.parameters()))
        for grad, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(gathered(other), grad, rtol=1e-3, atol=1e-6)


def of_torch(rank, ranks, port):
    start(rank, ranks, port)
    omniattn.hf.register()
    model = make()
    for head in (False, True):
        parallel = copy.deepcopy(model)
        if head:
            omniattn.hf.patch(parallel)
        parallelize(parallel, head)
        if not head:
            omniattn.hf.patch(parallel)
        compare(parallel, model)


def of_transformers(rank, ranks, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    start(rank, ranks, port)
    omniattn.hf.register()
    model = make()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if rank == 0:
        model.save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    parallel = hf.LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto").train()
    assert any(isinstance(p, DTensor) for p in parallel.parameters())
    omniattn.hf.patch(parallel)
    compare(parallel, model)


@pytest.mark.parametrize("work", ["of_torch", "of_transformers"])
def test_two_processes(work):
    run(__file__, work, 2)


if __name__ == "__main__":
    main({"of_torch": of_torch, "of_transformers": of_transformers})
