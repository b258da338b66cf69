"""A model on two processes (gloo) under DDP and FSDP2 against one process with all tokens."""

import sys

import torch
import torch.distributed as dist
from processes import run, start
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from omniattn.models import PRESETS, Llama


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model):
    """As large models start: no process but the first holds all weights."""
    with torch.device("meta"):
        empty = Llama(PRESETS["llama-test"], dtype=torch.float64)
    for layer in empty.layers:
        fully_shard(layer)
    fully_shard(empty)
    empty.to_empty(device="cpu")
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, weights, options=options)
    return empty


def compare(rank, ranks, port):
    start(rank, ranks, port)
    torch.manual_seed(0)
    model = Llama(PRESETS["llama-test"], dtype=torch.float64)
    tokens = torch.randint(97, (4, 12))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    mine = tokens[rank::ranks]
    for wrap in (sharded, replicated):
        model.zero_grad()
        wrapped = wrap(model)
        part = wrapped(mine[:, :-1], mine[:, 1:])
        part.backward()
        dist.all_reduce(part.detach())
        torch.testing.assert_close(part / ranks, loss)
        for name, p in wrapped.named_parameters():
            whole = p.grad.full_tensor() if wrap is sharded else p.grad
            torch.testing.assert_close(whole, gradients[name.removeprefix("module.")])
    dist.destroy_process_group()


def test_gradients_are_those_of_one_process():
    run(__file__, "compare", 2)


if __name__ == "__main__":
    compare(*map(int, sys.argv[2:]))
