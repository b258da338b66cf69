"""ExpertParallel on two processes (gloo) against the layer in one."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from omniattn.modules import ExpertParallel, MoE

CONFIG = MoE.Config(12, 20, 4, 2, shared_hidden_dim=8, capacity_factor=1.5, balance_coefficient=0.1)
#: Tokens of the two ranks: unequal ones, none on one rank.
TOKENS = [(7, 12), (0, 9)]


def make(tokens):
    torch.manual_seed(0)
    layer = MoE(CONFIG, dtype=torch.float64).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, torch.randn(sum(tokens), 12, dtype=torch.float64)


def grads(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}


def start(rank, port, seconds):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=seconds))


def compare(rank, port):
    start(rank, port, 60)
    for tokens in TOKENS:
        layer, x = make(tokens)
        y, dx, expected = grads(layer, x)
        layer, _ = make(tokens)
        layer.experts = ExpertParallel(layer.experts)
        mine = slice(0, tokens[0]) if rank == 0 else slice(tokens[0], None)
        ours = grads(layer, x[mine])
        torch.testing.assert_close(ours[0], y[mine])
        torch.testing.assert_close(ours[1], dx[mine])
        for name in ("gate_up_proj", "down_proj"):
            own = expected[f"experts.{name}"][2 * rank : 2 * rank + 2]
            torch.testing.assert_close(ours[2][f"experts.experts.{name}"], own)
    dist.destroy_process_group()


def lose_a_peer(rank, port):
    start(rank, port, 3)
    layer, x = make((5, 5))
    layer.experts = ExpertParallel(layer.experts)
    if rank == 1:
        os._exit(0)  # before the collective
    with pytest.raises(RuntimeError):
        layer(x)
    os._exit(0)


WORK = {f.__name__: f for f in (compare, lose_a_peer)}


@pytest.mark.parametrize("work", WORK)
def test_two_processes(work):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, work, str(rank), port], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    WORK[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
