"""A mixture of memories, made of packed convolutions and delta rules, in pieces and as a whole.

Each token is written into some of M memories, which are sequences of their own; of these most are
short and some empty. Du et al., MoM, 2025, arXiv:2502.13685.
"""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F

B, T, DIM, HEADS, K, V, MEMORIES, TAPS = 2, 37, 12, 2, 4, 5, 4, 4
SIZES = {"q": HEADS * K, "k": HEADS * K, "v": HEADS * V, "decay": HEADS, "beta": HEADS}


def weights(dtype=torch.float64) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = {name: (MEMORIES, DIM, size) for name, size in SIZES.items()}
    shapes |= {f"taps {name}": (SIZES[name], TAPS) for name in "qkv"} | {"gate": (DIM, MEMORIES)}
    return {n: torch.randn(s, generator=make, dtype=dtype) / 3 for n, s in shapes.items()}


def heads(t: torch.Tensor) -> torch.Tensor:
    return t.unflatten(-1, (HEADS, -1))


def memories(w, x, state=None):
    """y of the tokens, and the states of all memories after them."""
    share, chosen = (x @ w["gate"]).softmax(-1).topk(2)
    share = torch.zeros(*x.shape[:2], MEMORIES, dtype=x.dtype).scatter(-1, chosen, share)
    hit = (share > 0).permute(0, 2, 1)
    batch, memory, step = hit.nonzero(as_tuple=True)  # in the order of packed sequences
    ends = nnf.pad(hit.flatten(0, 1).sum(-1).cumsum(0), (1, 0))
    rows, before, after = x[batch, step], state or {}, {}
    made = {name: torch.einsum("nd,ndk->nk", rows, w[name][memory])[None] for name in SIZES}
    for name in "qkv":
        made[name], after[name] = F.causal_conv1d(
            made[name],
            w[f"taps {name}"],
            None,
            activation="silu",
            initial_state=before.get(name),
            cu_seqlens=ends,
            return_final_state=True,
        )
    o, after["s"] = F.gated_delta_rule(
        *(heads(made[name]) for name in "qkv"),
        nnf.logsigmoid(made["decay"]),
        made["beta"].sigmoid(),
        l2norm=True,
        initial_state=before.get("s"),
        cu_seqlens=ends,
    )
    o = o[0] * share[batch, step, memory][:, None, None]
    y = o.new_zeros(x.shape[0] * x.shape[1], HEADS, V)
    return y.index_add(0, batch * x.shape[1] + step, o).view(*x.shape[:2], HEADS, V), after


def by_tokens(w, x):
    """Computes the definition, token by token."""
    y = torch.zeros(*x.shape[:2], HEADS, V, dtype=x.dtype)
    share, chosen = (x @ w["gate"]).softmax(-1).topk(2)
    for b in range(len(x)):
        seen, s = [[] for _ in range(MEMORIES)], torch.zeros(MEMORIES, HEADS, K, V, dtype=x.dtype)
        for t, token in enumerate(x[b]):
            for part, m in zip(share[b, t], chosen[b, t].tolist(), strict=True):
                seen[m] = [token, *seen[m][: TAPS - 1]]
                q, k, v = (
                    sum(y @ w[n][m] * w[f"taps {n}"][:, -1 - i] for i, y in enumerate(seen[m]))
                    for n in "qkv"
                )
                q, k, v = (heads(nnf.silu(z)) for z in (q, k, v))
                q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
                s[m] *= (token @ w["decay"][m]).sigmoid()[:, None, None]
                error = v - torch.einsum("hk,hkv->hv", k, s[m])
                beta = (token @ w["beta"][m]).sigmoid()[:, None]
                s[m] += k[..., None] * (beta * error)[:, None]
                y[b, t] += part * torch.einsum("hk,hkv->hv", q * K**-0.5, s[m])
    return y


@pytest.mark.parametrize("sizes", [[T], [1] * T, [30, *[1] * 7], [2, 3, 32]], ids=str)
def test_memories_in_pieces_are_those_of_the_whole(sizes):
    w, x = weights(), torch.randn(B, T, DIM, dtype=torch.float64)
    state, parts = None, []
    for piece in x.split(sizes, 1):
        y, state = memories(w, piece, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), by_tokens(w, x))
