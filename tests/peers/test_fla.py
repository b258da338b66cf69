"""fla's own definitions of its ops in plain torch, its `naive.py` files, against ours: outputs,
final states and gradients."""

import inspect
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import peer_packages
import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat
from omniattn import functional as F

pytestmark = [pytest.mark.slow, peer_packages.require("fla", "ops/gla/naive.py")]
B, T, H, K, V = 2, 128, 2, 16, 32


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K).unbind()
    unit = nnf.normalize(torch.randn(B, T, H, K), dim=-1)
    return {
        "q": q,
        "k": nnf.normalize(k, dim=-1),
        "v": torch.randn(B, T, H, V),
        "g": nnf.logsigmoid(3 + torch.randn(B, T, H)),
        "gk": nnf.logsigmoid(3 + torch.randn(B, T, H, K)),
        "beta": torch.rand(B, T, H),
        "a": -unit,
        "b": unit * torch.rand(B, T, H, 1),
        "p": unit,
        "erased": torch.rand(B, T, H, K),
        "written": torch.rand(B, T, H, V),
        "u": torch.randn(H, K),
        "slots": torch.randn(B, T, H, 8),
        "gates of slots": nnf.logsigmoid(3 + torch.randn(B, T, H, 8)),
        "atk g": nnf.logsigmoid(3 + torch.randn(B, T, H)),
        "atk beta": torch.rand(B, T, H),
        "positive q": q.exp(),
        "positive k": k.exp(),
    }


class Naive(NamedTuple):
    """A function of theirs and the tensors in its order, and ours and those in its."""

    file: str
    name: str
    given: tuple[str, ...]
    ours: Callable[..., Any]
    ours_given: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    heads_first: bool = False


QKV = ("q", "k", "v")
FINAL = {"output_final_state": True}
DELTA = ("q", "k", "v", "g", "beta")
KDA = ("q", "k", "v", "gk", "beta")
IPLR, DPLR = ("q", "k", "v", "a", "b"), ("q", "k", "v", "a", "b", "gk")
COMBA = ("q", "k", "v", "p", "g", "beta")
COMBA_STEPS = ("q", "k", "v", "p", "beta", "g")
PRECOND = ("q", "k", "v", "atk g", "g", "atk beta", "beta")
PRECOND_KDA = ("q", "k", "v", "gk", "atk g", "atk beta", "beta")
GATES = ("q", "k", "v", "gk", "erased", "written")
GSA, ABC = ("q", "k", "v", "slots", "gates of slots"), ("q", "k", "v", "slots")
POSITIVE = ("positive q", "positive k", "v")


def iplr(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *low: torch.Tensor) -> Any:
    return compat.chunk_iplr_delta_rule(q, k, v, *low, output_final_state=True)


def comba(*given: torch.Tensor) -> Any:
    return F.comba(*given, erase_decayed=True)


def abc(*given: torch.Tensor) -> Any:
    return (F.abc_attention(*given)[0],)


def precond(q: torch.Tensor, k: torch.Tensor, *given: torch.Tensor) -> Any:
    q, k = (nnf.normalize(t, dim=-1) for t in (q, k))
    return F.preconditioned_delta_rule(q, k, *given)


def based(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return (compat.parallel_based(q, k, v),)


CASES = [
    Naive(
        "gla", "naive_recurrent_gla", (*QKV, "gk"), F.gated_linear_attention, (*QKV, "gk"), FINAL
    ),
    Naive(
        "simple_gla",
        "naive_recurrent_simple_gla",
        (*QKV, "g"),
        F.gated_linear_attention,
        (*QKV, "g"),
    ),
    Naive(
        "simple_gla",
        "naive_chunk_simple_gla",
        (*QKV, "g"),
        F.gated_linear_attention,
        (*QKV, "g"),
        FINAL,
    ),
    Naive("retention", "naive_retention", QKV, F.retention, QKV, heads_first=True),
    Naive(
        "delta_rule",
        "delta_rule_recurrence",
        (*QKV, "beta"),
        F.delta_rule,
        (*QKV, "beta"),
        heads_first=True,
    ),
    Naive(
        "delta_rule",
        "delta_rule_chunkwise",
        (*QKV, "beta"),
        F.delta_rule,
        (*QKV, "beta"),
        heads_first=True,
    ),
    Naive(
        "gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        (*QKV, "beta", "g"),
        F.gated_delta_rule,
        DELTA,
        FINAL,
    ),
    Naive(
        "gated_delta_rule", "naive_chunk_gated_delta_rule", DELTA, F.gated_delta_rule, DELTA, FINAL
    ),
    Naive("kda", "naive_recurrent_kda", KDA, F.kimi_delta_attention, KDA, FINAL),
    Naive("kda", "naive_chunk_kda", KDA, F.kimi_delta_attention, KDA, FINAL),
    Naive("generalized_delta_rule/iplr", "iplr_recurrence", IPLR, iplr, IPLR, heads_first=True),
    Naive(
        "generalized_delta_rule/dplr",
        "dplr_recurrence",
        DPLR,
        F.dplr_delta_rule,
        DPLR,
        heads_first=True,
    ),
    Naive(
        "generalized_delta_rule/dplr",
        "dplr_chunkwise",
        DPLR,
        F.dplr_delta_rule,
        DPLR,
        heads_first=True,
    ),
    Naive(
        "linear_attn",
        "naive_recurrent_linear_attn",
        QKV,
        compat.chunk_linear_attn,
        QKV,
        FINAL | {"normalize": False},
    ),
    Naive(
        "linear_attn",
        "naive_recurrent_linear_attn",
        POSITIVE,
        compat.chunk_linear_attn,
        POSITIVE,
        FINAL | {"normalize": True},
    ),
    Naive("comba", "naive_recurrent_comba", COMBA_STEPS, comba, COMBA, FINAL),
    Naive("comba", "naive_chunk_comba", COMBA, F.comba, COMBA, FINAL),
    Naive("gdn2", "naive_recurrent_gdn2", GATES, F.gated_delta_rule_2, GATES, FINAL),
    Naive(
        "gsa",
        "naive_recurrent_gsa",
        GSA,
        compat.chunk_gsa,
        GSA,
        FINAL,
    ),
    Naive(
        "abc",
        "naive_recurrent_abc",
        ABC,
        compat.chunk_abc,
        ABC,
        FINAL,
        heads_first=True,
    ),
    Naive("abc", "naive_cumsum_abc", ABC, abc, ABC, heads_first=True),
    Naive(
        "precond_gated_delta_rule",
        "naive_recurrent_precond_gated_delta_rule",
        PRECOND,
        precond,
        (*DELTA, "atk g", "atk beta"),
        FINAL,
    ),
    Naive(
        "precond_kda",
        "naive_recurrent_precond_kda",
        PRECOND_KDA,
        F.preconditioned_delta_rule,
        (*KDA, "atk g", "atk beta"),
        FINAL,
    ),
    Naive("based", "naive_parallel_based", QKV, based, QKV, heads_first=True),
    Naive(
        "rwkv6/recurrent_naive",
        "naive_recurrent_rwkv6",
        (*QKV, "gk", "u"),
        compat.chunk_rwkv6,
        (*QKV, "gk", "u"),
        FINAL,
        heads_first=True,
    ),
]


def leaves_of(value: Any) -> list[torch.Tensor]:
    """Tensors of nested results."""
    return [t for t in torch.utils._pytree.tree_leaves(value) if torch.is_tensor(t)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.given[0]}")
def test_naive(case):
    file = case.file if case.file.endswith("_naive") else f"{case.file}/naive"
    theirs = getattr(peer_packages.load("fla", f"ops/{file}.py"), case.name)
    leaves = {name: t.requires_grad_() for name, t in tensors().items() if name in case.given}

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2) if case.heads_first and t.dim() > 2 else t

    given = [turned(leaves[name]) for name in case.given]
    o, *states = leaves_of(theirs(*given, **case.options))
    expected = [turned(o), *states]
    library = case.ours.__module__.startswith("omniattn.compat")
    options = case.options if library else {}
    found = leaves_of(case.ours(*(leaves[name] for name in case.ours_given), **options))
    found = found[: len(expected)]
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    for ours, other in zip(
        *(
            torch.autograd.grad(sum(t.square().sum() for t in each), list(leaves.values()))
            for each in (found, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


def test_gated_delta_product():
    """Their keys and values of a token follow each other in T."""
    theirs = peer_packages.load("fla", "ops/gated_delta_product/naive.py")
    x = tensors()
    q, g = (x[name][:, ::2] for name in "qg")
    expected = theirs.naive_recurrent_gated_delta_product(
        *(q, x["k"], x["v"], g, x["beta"], 1.0, None), num_householder=2
    )
    k, v, beta = (x[name].unflatten(1, (-1, 2)) for name in ("k", "v", "beta"))
    found = F.gated_delta_product(q, k, v, g, beta, scale=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_path_attention():
    """fla multiplies the gates by the scale, too."""
    theirs = peer_packages.load("fla", "ops/path_attn/naive.py")
    q, k, w = (torch.randn(B, 70, heads, K) for heads in (2 * H, H, H))
    v, g = torch.randn(B, 70, H, V), torch.nn.functional.logsigmoid(torch.randn(B, 70, 2 * H))
    w, beta = torch.nn.functional.normalize(w, dim=-1), 2 * torch.rand(B, 70, H)
    expected = theirs.naive_path_attn(q, k, v, w, beta, g, 0.4)
    found = F.path_attention(q, k, v, w, beta, 0.4 * g, scale=0.4)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_mesa_net():
    """fla takes lamb before beta, and its H and G are square."""
    pytest.importorskip("einops")
    theirs = peer_packages.load("fla", "ops/mesa_net/naive.py")
    x, lamb = tensors(), torch.rand(H, K) + 0.25
    v = x["v"][..., :K]
    o, *states = theirs.naive_mesa_net_exact(x["q"], x["k"], v, x["g"], lamb, x["beta"])
    found, final = F.mesa_net(x["q"], x["k"], v, x["g"], x["beta"], lamb, max_iterations=50)
    torch.testing.assert_close((found, *final), (o, *states), rtol=1e-3, atol=1e-4)


def test_ttt_linear():
    theirs = peer_packages.load("fla", "ops/ttt/naive.py")
    x, eta = tensors(), torch.rand(B, 70, H) / 8
    rows = [x[name][:, :70, :, :K] for name in "qkv"]
    w, b = torch.randn(H, K), torch.randn(H, K)
    expected = theirs.chunk_ttt_linear_ref(
        *(t.clone() for t in rows), w, b, eta[..., None].clone(), output_final_state=True
    )
    found = compat.fla.chunk_ttt_linear(*rows, w, b, eta[..., None], output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_titans_linear(monkeypatch):
    """With parentheses in the gradient of the norm, which the naive code lacks."""
    other = peer_packages.load("fla", "ops/titans/log_impl.py")
    for name in ("fla", "fla.ops", "fla.ops.titans", "fla.ops.titans.log_impl"):
        monkeypatch.setitem(sys.modules, name, other)
    theirs = peer_packages.load("fla", "ops/titans/naive.py")
    source = inspect.getsource(theirs.titans_linear)
    lacking = "D * grad - grad.sum(-1, keepdim=True) / (rstd * D)\n        proj"
    assert source.count(lacking) == 1
    mended = lacking.replace(
        "D * grad - grad.sum(-1, keepdim=True)", "(D * grad - grad.sum(-1, keepdim=True))"
    )
    names = dict(vars(theirs))
    exec(source.replace(lacking, mended), names)
    x = tensors()
    rows = [x[name][:, :64, :, :K].transpose(1, 2) for name in "qkv"]
    rows[1] = torch.nn.functional.normalize(rows[1], dim=-1)
    w, b, start = torch.randn(H, K), torch.randn(H, K), torch.randn(B, H, K, K)
    gates = [torch.rand(B, H, 64, 1) / n for n in (8, 2, 1)]
    arguments = (*rows, w, b, *gates, 1e-6, 16, start, True)
    expected = names["titans_linear"](*arguments)
    torch.testing.assert_close(
        compat.fla.chunk_titans_linear(*arguments), expected, rtol=1e-3, atol=1e-3
    )
