"""Balance and z-losses of tokens on several ranks (gloo) against one process, in fp64."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start

from omniattn.functional.routing import BALANCE_LOSSES
from omniattn.modules import MoE
from omniattn.modules.experts.moe import IMPORTANCE_LOAD

EXACT = {"rtol": 1e-12, "atol": 1e-14}
OPTIONS = {"balance_coefficient": 0.1, "z_coefficient": 0.01, "groups": 2, "top_groups": 2}
#: Sequences of each rank, and tokens of each rank in a sequence; some have none.
SEQUENCES, TOKENS = (3, 0, 1, 2), (5, 2, 0, 4)


def layer_of(kind):
    noisy = kind == IMPORTANCE_LOAD
    options = {"balance_coefficient": 0.1, "router": "noisy"} if noisy else OPTIONS
    layer = MoE(MoE.Config.of(8, 12, 4, 2, balance=kind, **options), dtype=torch.float64)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def losses(layer, x, mask, share):
    """Returns both losses, and the gradients of tokens and router for this share of them."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    _, state = layer.route(x, mask)
    (share * (state.balance_loss + state.z_loss)).backward()
    weights = [p.grad for p in layer.gate.parameters() if p.grad is not None]
    return [state.balance_loss.detach(), state.z_loss.detach()], x.grad, weights


def of_kinds(rank, ranks, port):
    start(rank, ranks, port)
    group = dist.group.WORLD
    share = (rank + 1) / sum(range(ranks + 1))
    for kind in (*BALANCE_LOSSES, IMPORTANCE_LOAD):
        torch.manual_seed(0)
        layer = layer_of(kind)
        layer.gate.eval()  # ranks draw noise of their own
        for counts, sequences in ((SEQUENCES[:ranks], None), (TOKENS[:ranks], group)):
            dim = 0 if sequences is None else 1
            shape = (sum(counts), 6) if dim == 0 else (3, sum(counts))
            x = torch.randn(*shape, 8, dtype=torch.float64)
            for mask in (None, torch.rand(shape) < 0.8):
                layer.balance_over(None)
                expected = losses(layer, x, mask, 1.0)
                layer.balance_over(group, sequences)
                own = None if mask is None else mask.split(counts, dim)[rank]
                found = losses(layer, x.split(counts, dim)[rank], own, share)
                torch.testing.assert_close(found[0], expected[0], **EXACT, msg=kind)
                torch.testing.assert_close(found[1], expected[1].split(counts, dim)[rank], **EXACT)
                for ours, theirs in zip(found[2], expected[2], strict=True):
                    dist.all_reduce(ours)
                    torch.testing.assert_close(ours, theirs, **EXACT)
    assert copy.deepcopy(layer)._ranks.tokens is None
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_all_tokens(ranks):
    run(__file__, "of_kinds", ranks)


if __name__ == "__main__":
    main({"of_kinds": of_kinds})
