"""fla's context parallelism on several processes (gloo) against one process, in fp64.

Lengths as in fla's tests/context_parallel (fla-org/flash-linear-attention at bc3b101dcb71): rows
cut within a sequence, at boundaries, in one sequence, in many; here also with states.
"""

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.nn import functional as nnf
from torch.testing import assert_close

from omniattn.compat import fla

EXACT = {"rtol": 1e-11, "atol": 1e-12}
T, HEADS, K, V, W = 24, 2, 4, 5, 4
#: The last ones: a sequence of one token before a cut, and of one after it; an empty sequence.
LENGTHS = ([24], [12, 12], [7, 10, 7], [5, 6, 1, 12], [11, 2, 0, 5, 6], [3, 3, 1, 5, 1, 11])


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rows(*sizes):
    return randn(1, T, *sizes)


def unit(*sizes):
    return nnf.normalize(rows(*sizes), dim=-1)


def cases():
    """Functions, their tensors of tokens, other tensors, and the sizes of a state."""
    q, k, v = rows(HEADS, K), unit(HEADS, K), rows(HEADS, V)
    g, gk, beta = -rows(HEADS).abs(), -rows(HEADS, K).abs(), rows(HEADS).sigmoid()
    a, b = -unit(HEADS, K), unit(HEADS, K) * rows(HEADS, K).sigmoid()
    state = (HEADS, K, V)
    yield fla.chunk_gated_delta_rule, dict(q=q, k=k, v=v, g=g, beta=beta), {}, state
    yield fla.chunk_gdn, dict(q=q, k=k, v=v, g=g, beta=beta), dict(state_v_first=True), (2, V, K)
    yield fla.chunk_kda, dict(q=q, k=k, v=v, g=gk, beta=beta), {}, state
    yield fla.chunk_dplr_delta_rule, dict(q=q, k=k, v=v, a=a, b=b, gk=gk), {}, state
    yield fla.chunk_rwkv7, dict(r=q, w=gk, k=k, v=v, a=a, b=b), {}, state
    more = dict(weight=randn(6, W), bias=randn(6), activation="silu")
    yield fla.causal_conv1d, dict(x=rows(6), residual=rows(6)), more, (6, W)


def leaves(tensors):
    return {
        name: t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) else t
        for name, t in tensors.items()
    }


def pulled(out, tensors, pull):
    """Gradients of the sum of pull o and of pull's part for the state."""
    inputs = [t for t in tensors.values() if isinstance(t, torch.Tensor)]
    out = [t for t in out if t is not None]
    return torch.autograd.grad(out, inputs, pull[: len(out)], materialize_grads=True)


def check(rank, ranks, lengths, call, tokens, more, sizes, with_states):
    edges = torch.tensor([0, *lengths]).cumsum(0)
    context = fla.build_cp_context(edges, dist.group.WORLD)
    size = T // ranks
    mine = slice(rank * size, (rank + 1) * size)
    # The sequences with tokens on this rank, those of them that begin and that end on it.
    starts, ends = edges[:-1], edges[1:]
    here = ((starts < mine.stop) & (ends > mine.start) & (starts < ends)).nonzero()[:, 0]
    begins, last = starts[here] >= mine.start, ends[here] <= mine.stop
    assert context.num_seqs == len(here)
    assert context.is_first_rank == begins[0] and context.is_last_rank == last[-1]
    states = randn(len(lengths), *sizes)
    whole = {**tokens, **more, **({"initial_state": states} if with_states else {})}
    whole = leaves(whole)
    want = call(**whole, cu_seqlens=edges, output_final_state=with_states)
    pull = randn(*want[0].shape), randn(len(lengths), *sizes)
    names = [n for n, t in whole.items() if isinstance(t, torch.Tensor)]
    gradients = dict(zip(names, pulled(want, whole, pull), strict=True))
    part = {n: t[:, mine] for n, t in tokens.items()} | more
    if with_states:
        part["initial_state"] = states[here]
    part = leaves(part)
    out = call(**part, cp_context=context, output_final_state=with_states)
    assert_close(out[0], want[0][:, mine], **EXACT)
    mine_pull = [pull[0][:, mine]]
    if with_states:
        assert_close(out[1][last], want[1][here][last], **EXACT)
        mine_pull.append(torch.where(last.view(-1, *[1] * len(sizes)), pull[1][here], 0.0))
    else:
        assert out[1] is None
    found = pulled(out, part, mine_pull)
    for (name, wanted), grad in zip(gradients.items(), found, strict=True):
        where = f"{call.__name__} {lengths} {name} on rank {rank} of {ranks}"
        if name in tokens:
            wanted = wanted[:, mine]
        elif name == "initial_state":
            assert not grad[~begins].any(), where
            grad, wanted = grad[begins], wanted[here][begins]
        else:
            grad = grad.clone()
            dist.all_reduce(grad)
        assert_close(grad, wanted, **EXACT, msg=lambda m, w=where: f"{w}: {m}")


def check_shift(rank, ranks, lengths):
    edges = torch.tensor([0, *lengths]).cumsum(0)
    context = fla.build_cp_context(edges, dist.group.WORLD)
    mine = slice(rank * T // ranks, (rank + 1) * T // ranks)
    x = rows(3).requires_grad_()
    want, pull = fla.token_shift(x, edges), rows(3)
    part = x.detach()[:, mine].clone().requires_grad_()
    out = fla.token_shift_cp(part, context, cu_seqlens=context.cu_seqlens)
    assert_close(out, want[:, mine])
    (whole,) = torch.autograd.grad(want, x, pull)
    (grad,) = torch.autograd.grad(out, part, pull[:, mine])
    assert_close(grad, whole[:, mine])


def work(rank, ranks, port):
    start(rank, ranks, port)
    torch.manual_seed(0)
    for lengths in LENGTHS:
        for call, tokens, more, sizes in cases():
            for with_states in (False, True):
                check(rank, ranks, lengths, call, tokens, more, sizes, with_states)
        check_shift(rank, ranks, lengths)
    refuse(rank, ranks)
    dist.destroy_process_group()


def refuse(rank, ranks):
    """All ranks get the error, before any message; it names fla's arguments."""
    context = fla.build_cp_context(torch.tensor([0, T]), dist.group.WORLD, conv1d_kernel_size=W)
    x = {name: t[:, : T // ranks] for name, t in next(cases())[1].items()}
    rule, conv = fla.chunk_gated_delta_rule, fla.causal_conv1d
    short, wide, long = rows(6)[:, :3], randn(6, W + 1), torch.tensor([0, T + 1])
    few = fla.build_cp_context(torch.tensor([0, 3 * ranks]), dist.group.WORLD)
    kda = {**x, "g": -rows(HEADS, K).abs()[:, : T // ranks]}
    group = dist.group.WORLD
    for error, message, call in (
        (TypeError, "_rule: cp_context must be a result", lambda: rule(**x, cp_context=1)),
        (ValueError, "_rule: cu_seqlens must be None or those of cp_context",
         lambda: rule(**x, cp_context=context, cu_seqlens=torch.tensor([0, 1]))),
        (ValueError, "cp_context must have cu_seqlens",
         lambda: rule(**x, cp_context=fla.FLACPContext())),
        (ValueError, "_rule: initial_state must have shape",
         lambda: rule(**x, cp_context=context, initial_state=randn(2, HEADS, K, V))),
        (ValueError, "return_intermediate_states must be False with cp_context",
         lambda: fla.chunk_kda(**kda, cp_context=context, return_intermediate_states=True)),
        (ValueError, "with cp_context a rank must have 4 tokens",
         lambda: conv(short, randn(6, W), cp_context=few)),
        (ValueError, "cp_context.conv1d_kernel_size must be None or",
         lambda: conv(rows(6)[:, : T // ranks], wide, cp_context=context)),
        (ValueError, "cu_seqlens", lambda: rule(**x, cp_context=few)),
        (NotImplementedError, "cp_context is not supported",
         lambda: fla.fused_recurrent_gated_delta_rule(**x, cp_context=context)),
        (TypeError, "build_cp_context: group must be", lambda: fla.build_cp_context(long, None)),
        (ValueError, "must be a positive multiple of the number of ranks",
         lambda: fla.build_cp_context(long, group)),
        (ValueError, "cu_seqlens must grow from 0",
         lambda: fla.build_cp_context(torch.tensor([0, 4, 2, T]), group)),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert message in str(caught.value), caught.value
    out = rule(**x, cp_context=context.copy_for_backward())[0]  # nothing remains
    assert out.shape == x["v"].shape


def test_a_context_without_a_group_is_one_part():
    torch.manual_seed(0)
    edges = torch.tensor([0, 5, T])
    alone = fla.FLACPContext(cu_seqlens=edges)
    assert alone.num_seqs == 2 and not alone.is_cp_enabled
    for call, tokens, more, _ in cases():
        want = call(**tokens, **more, cu_seqlens=edges)[0]
        assert torch.equal(call(**tokens, **more, cp_context=alone)[0], want)
    x = rows(3)
    assert torch.equal(fla.token_shift_cp(x, alone), fla.token_shift(x, edges))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(ranks):
    run(__file__, "work", ranks)


if __name__ == "__main__":
    main({"work": work})
