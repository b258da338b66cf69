"""Compressed sparse attention: that of transformers, its state, its indexer's loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.modules import CompressedSparseAttention, RotaryEmbedding
from omniattn.modules.sparse.compressor import rotated

SIZES = {"dim": 24, "num_heads": 4, "head_dim": 8, "q_lora_rank": 10, "rope_dim": 4}
SIZES |= {"o_groups": 2, "o_lora_rank": 5, "window": 5, "init_std": 0.5, "out_init_std": 0.5}
CSA = {"compress_rate": 3, "index_topk": 3, "index_heads": 16, "index_dim": 6}
HCA = {"compress_rate": 4, "overlap": False, "index_topk": None}
KINDS = {"csa": CSA, "hca": HCA, "few": CSA | {"index_topk": 20}}


def made(kind: str, **changes: Any) -> CompressedSparseAttention:
    torch.manual_seed(0)
    layer = CompressedSparseAttention(**SIZES | KINDS[kind] | changes, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1 or "position_bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def tokens(length: int = 26) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, RotaryEmbedding(4)(torch.arange(length))


class InDouble:
    """torch, with float64 in place of float32, in which their layer computes a part."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    monkeypatch.setattr(v4, "torch", InDouble())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return v4


def config_of(v4: Any, layer: CompressedSparseAttention) -> Any:
    c = layer.config
    name = "compressed_sparse_attention" if c.overlap else "heavily_compressed_attention"
    return v4.DeepseekV4Config(
        hidden_size=c.dim,
        num_attention_heads=c.num_heads,
        head_dim=c.head_dim,
        q_lora_rank=c.q_lora_rank,
        partial_rotary_factor=c.rope_dim / c.head_dim,
        num_hidden_layers=1,
        layer_types=[name],
        compress_rates={name: c.compress_rate},
        sliding_window=c.window,
        o_groups=c.o_groups,
        o_lora_rank=c.o_lora_rank,
        index_n_heads=c.index_heads,
        index_head_dim=c.index_dim,
        index_topk=c.index_topk or 1,
        attn_implementation="eager",
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_outputs_of_transformers(theirs: Any, kind: str) -> None:
    layer = made(kind).eval()
    config = config_of(theirs, layer)
    attention = theirs.DeepseekV4Attention(config, 0).double().eval()
    attention.load_state_dict(layer.state_dict())
    x, rope = tokens()
    at = torch.arange(26)
    near = (at[:, None] >= at) & (at[:, None] - at < layer.config.window)
    mask = torch.zeros(26, 26, dtype=torch.float64).masked_fill(~near, -torch.inf)
    tables = tuple(t.double().expand(2, -1, -1) for t in rope)
    for module in attention.modules():
        if isinstance(module, theirs.DeepseekV4RotaryEmbedding):
            module.forward = lambda x, position_ids, layer_type: tuple(
                t[0][position_ids] for t in tables
            )
    want, _ = attention(
        x, {"compress": tables}, at.expand(2, -1), mask.expand(2, 1, -1, -1), cache=None
    )
    torch.testing.assert_close(layer(x, rope=rope), want, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ends", [(9, 10, 12, 26), (2, 3, 4, 5, 6, 7, 8, 9, 26), (25, 26)], ids=lambda ends: str(ends[0])
)
def test_steps_equal_the_whole(kind: str, ends: tuple[int, ...]) -> None:
    layer = made(kind).eval()
    x, rope = tokens()
    state, parts = layer.new_state(2, 26), []
    for a, b in zip((0, *ends), ends, strict=False):
        state = copy.deepcopy(state)
        state.reorder(torch.tensor([1, 0]))
        state.reorder(torch.tensor([1, 0]))
        parts.append(layer(x[:, a:b], state=state, rope=tuple(t[a:b] for t in rope)))
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, rope=rope))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_the_state_counts_goes_back_and_refuses(kind: str) -> None:
    layer = made(kind).eval()
    x, rope = tokens(12)
    full, c = layer(x, rope=rope), layer.config

    def part(state: Any, a: int, b: int) -> Tensor:
        return layer(x[:, a:b], state=state, rope=tuple(t[a:b] for t in rope))

    state = layer.new_state(2, 12)
    near, compressed = 5 * 8, 12 // c.compress_rate * (8 + (6 if c.overlap else 0))
    rows = 6 * (2 * (16 + 12) + 4) if c.overlap else 4 * (2 * 8 + 4)
    assert state.nbytes == 2 * 8 * (near + compressed + rows)
    part(state, 0, 4)
    saved = copy.deepcopy(state.state_dict())
    state.crop(2)
    torch.testing.assert_close(part(state, 2, 12), full[:, 2:])
    with pytest.raises(ValueError, match=r"RollingCache: tokens before position 3 must not be"):
        state.crop(3)
    assert {cache.length for cache in (state.near, state.rows, state.tables)} == {12}
    assert state.compressed.length == 12 // c.compress_rate
    with pytest.raises(
        ValueError, match=r"CSAState: length must not exceed max_length=12, got .*13"
    ):
        part(state, 0, 1)
    other = layer.new_state(2, 12)
    other.load_state_dict(saved)
    torch.testing.assert_close(part(other, 4, 12), full[:, 4:])
    with pytest.raises(ValueError, match="state must have compress_rate=5 and overlap=True, got"):
        made("csa", compress_rate=5)(x, state=other, rope=rope)
    with pytest.raises(TypeError, match="state must be a CSAState, got dict"):
        layer(x, state={}, rope=rope)


@pytest.mark.parametrize("length", [2, 11, 26])
@pytest.mark.parametrize("kind", ["csa", "few"])
def test_the_loss_of_the_indexer(kind: str, length: int) -> None:
    """KL(p || softmax I) over the selected keys, p the attention weights summed over heads."""
    layer = made(kind)
    c, (x, rope) = layer.config, tokens(length)
    y = layer(x, rope=rope)
    tables = tuple(t[None].double() for t in rope)
    q, k = queries_and_keys(layer, x, tables)
    rows = zip(*(each.rows(x) for each in layer._compressors), strict=True)
    keys, k_idx = layer._compressed(None, *(torch.cat(parts, -1) for parts in rows), tables)
    latent = layer.q_a_norm(layer.q_a_proj(x))
    q_idx, weights = layer.compressor.indexer.queries(x, latent, tables)
    scores = torch.einsum(
        "bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", q_idx, k_idx).relu()
    )
    at = torch.arange(length)
    visible = torch.arange(keys.shape[1]) < ((at + 1) // c.compress_rate)[:, None]
    order = scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True)[1]
    chosen = torch.zeros_like(scores).scatter(-1, order[..., : c.index_topk], 1).bool() & visible
    near = (at[:, None] >= at) & (at[:, None] - at < c.window)
    logits = torch.cat(
        [
            torch.einsum("bihd,bjhd->bhij", q, k.expand(-1, -1, 4, -1)).masked_fill(
                ~near, -torch.inf
            ),
            torch.einsum("bihd,bjhd->bhij", q, keys.expand(-1, -1, 4, -1)).masked_fill(
                ~chosen[:, None], -torch.inf
            ),
            layer.sinks[:, None, None].expand(2, 4, length, 1) * 8**0.5,
        ],
        -1,
    )
    p = (logits * 8**-0.5).softmax(-1).detach()[..., length:-1].sum(1)
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
    logs = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
    loss = (torch.xlogy(p, p) - p * logs).sum(-1).mean()
    torch.testing.assert_close(layer.auxiliary, loss)

    own = [p for name, p in layer.named_parameters() if ".indexer." in name]
    others = [p for name, p in layer.named_parameters() if ".indexer." not in name]
    got = torch.autograd.grad(layer.auxiliary, own, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(loss, own))
    # Neither loss moves the parameters of the other.
    for loss, parameters in ((layer.auxiliary, others), (y.sum(), own)):
        found = torch.autograd.grad(
            loss, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        assert not any(g.any() for g in found)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), others))
    layer.eval()(x, rope=rope)
    assert layer.auxiliary is None


def queries_and_keys(
    layer: CompressedSparseAttention, x: Tensor, tables: Any
) -> tuple[Tensor, Tensor]:
    """Queries (B, T, H, D) and keys (B, T, 1, D) of the window, with transformers' rotation."""
    q = layer.q_b_proj(layer.q_a_norm(layer.q_a_proj(x))).unflatten(-1, (4, 8))
    q = functional.rms_norm(q, eps=layer.config.norm_eps)
    k = layer.kv_norm(layer.kv_proj(x))[:, :, None]
    return rotated(q, tables, None), rotated(k, tables, None)
