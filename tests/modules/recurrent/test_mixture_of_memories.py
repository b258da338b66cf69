"""Mixture of memories: its formula token by token, decoding, packed sequences, errors."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import MixtureOfMemories

DIM = 12
SIZES = {"num_memories": 4, "conv_size": 3, "init_std": 0.4}
CONFIGS = {
    "plain": MixtureOfMemories.Config(DIM, 2, **SIZES),
    "shared": MixtureOfMemories.Config(DIM, 2, shared_memory=True, gate=None, **SIZES),
    "one projection": MixtureOfMemories.Config(
        DIM, 2, shared_projections=True, shared_memory=True, top_k=1, **SIZES
    ),
}


def made(name: str) -> tuple[MixtureOfMemories, torch.Tensor]:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=torch.float64)
    return layer, torch.randn(2, 9, DIM, dtype=torch.float64)


def memory_of(layer: MixtureOfMemories, number: int, x: torch.Tensor) -> torch.Tensor:
    """Outputs of one memory for its tokens x (T, dim)."""
    c = layer.config
    one = c.shared_projections or number == c.num_memories

    def projected(name: str) -> torch.Tensor:
        if name == "q":
            return layer.q_proj(x)
        module = f"shared_{name}" if one else f"{name}_proj.{number}"
        return layer.get_submodule(module)(x)

    def convolved(name: str) -> torch.Tensor:
        weight = getattr(layer, f"{name}_conv1d").weight
        y = nnf.pad(projected(name).T, (2, 0))[None]
        return nnf.silu(nnf.conv1d(y, weight, groups=y.shape[1])[0].T).unflatten(-1, (2, -1))

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    beta = projected("b").sigmoid()
    a = (-layer.A_log.exp() * nnf.softplus(projected("a") + layer.dt_bias)).exp()
    s, out = torch.zeros(2, c.k_size, c.v_size, dtype=x.dtype), []
    for t in range(len(x)):
        s = s * a[t, :, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", s, k[t])
        s = s + beta[t, :, None, None] * k[t, ..., None] * error[:, None]
        out.append(torch.einsum("hkv,hk->hv", s, q[t]) * c.k_size**-0.5)
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula(name):
    layer, x = made(name)
    c = layer.config
    best, index = layer.gate(x).softmax(-1).topk(c.top_k, -1)
    weights = torch.zeros(2, 9, c.memories, dtype=x.dtype)
    weights.scatter_(-1, index, best / best.sum(-1, keepdim=True))
    if c.shared_memory:
        weights[..., -1] = 1
    o = torch.zeros(2, 9, 2, c.v_size, dtype=x.dtype)
    for b in range(2):
        for m in range(c.memories):
            mine = weights[b, :, m].nonzero().flatten()
            if len(mine) > 0:
                o[b, mine] += weights[b, mine, m, None, None] * memory_of(layer, m, x[b, mine])
    o = nnf.rms_norm(o, (c.v_size,), layer.o_norm.weight, 1e-5).flatten(2)
    if c.gate is not None:
        o = o * nnf.silu(layer.g_proj(x))
    torch.testing.assert_close(layer(x), layer.o_proj(o))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_and_packed_sequences(name):
    layer, x = made(name)
    y, state = layer(x), layer.new_state(2, 9)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), y)
    nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    torch.testing.assert_close(layer(nested).values(), torch.cat((y[0], y[1, :4])))


def test_gradients():
    layer, x = made("shared")
    layer(x.requires_grad_()).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_errors():
    with pytest.raises(ValueError, match="MixtureOfMemories: top_k must be at most num_memories"):
        MixtureOfMemories(8, 2, num_memories=2, top_k=3)
    with pytest.raises(ValueError, match="MixtureOfMemories: num_v_heads must be None"):
        MixtureOfMemories(8, 2, num_v_heads=4)
