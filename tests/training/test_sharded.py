"""MasterAdamW and clip_gradients on weights that FSDP2 shards over two processes."""

import copy

import pytest
import torch
from processes import main, run, start
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from omniattn.models import LlamaConfig
from omniattn.training import MasterAdamW, clip_gradients, parameter_groups

CONFIG = LlamaConfig(vocab_size=31, dim=16, num_layers=2, num_heads=2, hidden_dim=24)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model, optimizer, tokens):
    """Runs a step, and returns the norm of its gradients."""
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.collect()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    norm = clip_gradients(masters, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    return full(norm)


def masters(rank, ranks, port):
    """Both ranks have the same tokens, so that the mean of their gradients is exact."""
    start(rank, ranks, port)
    torch.manual_seed(0)
    whole = CONFIG.build(dtype=torch.bfloat16)
    sharded = copy.deepcopy(whole)
    for part in (*sharded.layers, sharded):
        fully_shard(part)
    tokens = torch.randint(31, (3, 2, 9))
    ours, theirs = (MasterAdamW(parameter_groups(m, 0.1), lr=1e-4) for m in (sharded, whole))
    for part in tokens[:2]:
        norm, expected = step(sharded, ours, part), step(whole, theirs, part)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert norm > 0.5
        for own, other in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert own.dtype == torch.bfloat16 and torch.equal(full(own), other)
        pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
        for own, other in [p for a, b in pairs for p in zip(a["params"], b["params"], strict=True)]:
            assert own.dtype == torch.float32 and own.to_local().numel() < other.numel()
            torch.testing.assert_close(full(own), other, rtol=1e-6, atol=1e-7)
    saved = copy.deepcopy(ours.state_dict())
    step(sharded, ours, tokens[2])
    after = [full(weight).clone() for weight in sharded.parameters()]
    ours.load_state_dict(saved)
    before = [full(weight) for weight in sharded.parameters()]
    assert not all(map(torch.equal, before, after))
    step(sharded, ours, tokens[2])
    assert all(map(torch.equal, map(full, sharded.parameters()), after))


@pytest.mark.slow
def test_masters_are_sharded_as_their_weights():
    """Two processes compute what one does, and resume with the same bits."""
    run(__file__, "masters", 2)


if __name__ == "__main__":
    main({"masters": masters})
