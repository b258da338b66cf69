"""ExpertParallel on two and four processes (gloo) against the layer in one."""

import functools
import itertools
import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.utils.checkpoint import checkpoint

from omniattn.functional import Routing
from omniattn.modules import ExpertParallel, MoE
from omniattn.modules.experts import expert_parallel

CONFIG = MoE.Config.of(
    12, 20, 4, 2, shared_hidden_dim=8, capacity_factor=1.5, balance_coefficient=0.1
)
LLAMA4 = MoE.Config.llama4(12, 20, 4)
DEFAULT = MoE.Config.of(12, 20, 4, 2, router_grad="default_vector", default_decay=0.6)
#: Tokens of the ranks, by their number: unequal ones, none on some.
TOKENS = {2: [(7, 12), (0, 9)], 4: [(3, 0, 7, 5), (0, 0, 0, 1)]}


def make(tokens, config=CONFIG):
    torch.manual_seed(0)
    layer = MoE(config, dtype=torch.float64).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, torch.randn(sum(tokens), 12, dtype=torch.float64)


def grads(layer, x, run=None):
    x = x.clone().requires_grad_()
    y = (run or layer)(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}


def train(layer, x):
    """A step that moves the default vectors, then one that learns of them."""
    layer.train()(x)
    layer.update_default_vectors()
    return *grads(layer, x), layer.experts


def compare_default_vectors(rank, tokens, overlap):
    layer, x = make(tokens, DEFAULT)
    y, dx, expected, experts = train(layer, x)
    layer, _ = make(tokens, DEFAULT)
    layer.experts = ExpertParallel(layer.experts, overlap=overlap)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    ours = train(layer, x[mine])
    torch.testing.assert_close(ours[:2], (y[mine], dx[mine]))
    router = ours[2]["gate.weight"]
    dist.all_reduce(router)
    torch.testing.assert_close(router, expected["gate.weight"])
    torch.testing.assert_close(ours[3].default_vectors, experts.default_vectors)


def unlike_ranks(rank, tokens):
    """Only the first needs a gradient of its tokens; one has weights that are no numbers."""
    layer, x = make(tokens)
    experts = ExpertParallel(layer.experts)
    mine = x[sum(tokens[:rank]) : sum(tokens[: rank + 1])].requires_grad_(rank == 0)
    index = torch.tensor([[1, -1]]).expand(len(mine), 2)
    weights = torch.tensor([[1.0, torch.nan]], dtype=x.dtype).expand(len(mine), 2)
    routing = Routing(index, weights, x.new_zeros(len(mine), 4))
    y = experts(mine, routing)
    y.sum().backward()
    assert y.isfinite().all() and experts.experts.down_proj.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert experts.float()(mine.detach().float(), routing).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="overlap must be True or False, got overlap=2"):
        ExpertParallel(layer.experts, overlap=2)
    with pytest.raises(
        RuntimeError, match=r"experts must be in \[0, 4\) or -1 for none, got routing.experts=4"
    ):
        experts(x, Routing(torch.full((len(x), 1), 4), x[:, :1], x[:, :4]))


def overlapping(tokens):
    """In forward and backward one half of the tokens is on its way while experts compute."""
    layer, x = make(tokens)
    layer.experts = ExpertParallel(layer.experts, overlap=True)
    started, finished = [], []

    class Traced(expert_parallel._Overlapped):
        def start(self, *given):
            started.append(self)
            return super().start(*given)

        def finish(self):
            finished.append(self)
            return super().finish()

    under_way = []

    def compute(rows, routing):
        under_way.append(len(started) - len(finished))
        y = layer.experts.experts(rows, routing)
        if y.requires_grad:
            y.register_hook(lambda grad: under_way.append(len(started) - len(finished)))
        return y

    with mock.patch.object(expert_parallel, "_Overlapped", Traced):
        layer.experts.compute = compute
        layer(x.requires_grad_()).sum().backward()
    assert under_way == [1, 1, 1, 1] and len(started) == len(finished) == 8


def compare(rank, ranks, port):
    start(rank, ranks, port)
    local = CONFIG.experts.experts // ranks
    for tokens, config in itertools.product(TOKENS[ranks], (CONFIG, LLAMA4)):
        layer, x = make(tokens, config)
        y, dx, expected = grads(layer, x)
        first = sum(tokens[:rank])
        mine = slice(first, first + tokens[rank])
        outputs = []
        for overlap, repeated in itertools.product((False, True), (False, True)):
            layer, _ = make(tokens, config)
            layer.experts = ExpertParallel(layer.experts, overlap=overlap)
            run = functools.partial(checkpoint, layer, use_reentrant=False) if repeated else layer
            ours = grads(layer, x[mine], run)
            outputs.append(ours[:2])
            assert all(map(torch.equal, outputs[0], ours[:2]))
            torch.testing.assert_close(ours[0], y[mine])
            torch.testing.assert_close(ours[1], dx[mine])
            for name in ("gate_up_proj", "down_proj"):
                own = expected[f"experts.{name}"][local * rank : local * (rank + 1)]
                torch.testing.assert_close(ours[2][f"experts.experts.{name}"], own)
    for tokens, overlap in itertools.product(TOKENS[ranks], (False, True)):
        compare_default_vectors(rank, tokens, overlap)
    overlapping(TOKENS[ranks][0])
    unlike_ranks(rank, TOKENS[ranks][0])
    dist.destroy_process_group()


def lose_a_peer_before(step, rank, ranks, port):
    start(rank, ranks, port)
    dist.barrier()  # only what follows must not wait for long
    group = dist.new_group(timeout=timedelta(seconds=3))
    layer, x = make((5,) * ranks)
    layer.experts = ExpertParallel(layer.experts, group)
    if step == "forward" and rank == 1:
        os._exit(0)  # before the collective
    if step == "backward":
        y = layer(x)
        if rank == 1:
            os._exit(0)
    with pytest.raises(RuntimeError):
        layer(x) if step == "forward" else y.sum().backward()
    os._exit(0)


WORK = {
    "compare": compare,
    "lose_a_peer_before_forward": functools.partial(lose_a_peer_before, "forward"),
    "lose_a_peer_before_backward": functools.partial(lose_a_peer_before, "backward"),
}


@pytest.mark.parametrize(
    ("work", "ranks"),
    [
        ("compare", 2),
        ("compare", 4),
        ("lose_a_peer_before_forward", 4),
        ("lose_a_peer_before_backward", 2),
    ],
)
def test_processes(work, ranks):
    run(__file__, work, ranks)


if __name__ == "__main__":
    main(WORK)
