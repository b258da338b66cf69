"""DeepSeek sparse attention: its formula, that of transformers, the losses of its stages."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from omniattn.models import generate
from omniattn.models.presets import TRAINED
from omniattn.modules import DeepSeekSparseAttention, KVCache, RotaryEmbedding

SIZES = {"dim": 24, "num_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 8}
SIZES |= {"qk_nope_dim": 6, "qk_rope_dim": 4, "v_dim": 5}
INDEX = {"index_heads": 2, "index_dim": 7, "index_topk": 5, "init_std": 0.4}


def made(**changes) -> DeepSeekSparseAttention:
    torch.manual_seed(0)
    return DeepSeekSparseAttention(**SIZES | INDEX | changes).double()


def tokens(length: int = 17) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, RotaryEmbedding(4)(torch.arange(length))


def half_split(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The first four dimensions of x (B, T, H, D) rotated in pairs (0, 2), (1, 3)."""
    cos, sin = (t.double()[:, None] for t in rope)
    a, b, rest = x.split([2, 2, x.shape[-1] - 4], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def scores_of(layer: DeepSeekSparseAttention, x: torch.Tensor, rope) -> torch.Tensor:
    """I (B, T, T) by section 3 of the report."""
    latent = layer.q_a_layernorm(layer.q_a_proj(x))
    q = half_split((latent @ layer.indexer.wq_b.weight.T).unflatten(-1, (2, 7)), rope)
    norm = layer.indexer.k_norm
    k = nn.functional.layer_norm(x @ layer.indexer.wk.weight.T, (7,), norm.weight, norm.bias, 1e-6)
    k = half_split(k[:, :, None], rope)[:, :, 0]
    w = x @ layer.indexer.weights_proj.weight.T / math.sqrt(2) / math.sqrt(7)
    return torch.einsum("bth,bths->bts", w, torch.einsum("bthd,bsd->bths", q, k).relu())


def seen_by(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest up to each query."""
    length = scores.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    ranked = scores.masked_fill(~causal, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
    return chosen & causal


def dense(layer: DeepSeekSparseAttention, x: torch.Tensor, rope, seen: torch.Tensor):
    """y and P (B, H, T, T) of latent attention with a mask (B, T, T)."""
    q = layer._rotate(layer._queries(layer._query_latent(x), x), 6, rope)
    latent, _, k_rope = layer._latents(x)
    k, v = layer._expand(latent[:, :, 0], latent[:, :, 0])
    k_rope = layer._rotate(k_rope, 0, rope).expand(-1, -1, 3, -1)
    logits = torch.einsum("bihd,bjhd->bhij", q, torch.cat([k, k_rope], -1)) * layer.config.scale
    p = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return layer.o_proj(torch.einsum("bhij,bjhd->bihd", p, v).flatten(-2)), p


def divergence(p: torch.Tensor, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of KL(p summed over heads and normalised || softmax I)."""
    target = p.detach().sum(1)
    target = target / target.sum(-1, keepdim=True)
    logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    terms = torch.xlogy(target, target) - target * logs.masked_fill(~seen, 0)
    return terms.sum(-1).mean()


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_attention_and_loss_are_those_of_a_mask(stage: str) -> None:
    layer = made(stage=stage)
    nn.init.uniform_(layer.indexer.k_norm.weight, 0.5, 1.5)
    x, rope = tokens()
    scores = scores_of(layer, x, rope)
    seen = seen_by(scores, 5 if stage == "sparse" else 17)
    want, p = dense(layer, x, rope, seen)
    y = layer(x, rope=rope)
    torch.testing.assert_close(y, want)
    loss = divergence(p, scores, seen)
    torch.testing.assert_close(layer.auxiliary, loss)

    own = {n: p for n, p in layer.named_parameters() if n.startswith("indexer.")}
    others = {n: p for n, p in layer.named_parameters() if n not in own}
    got = torch.autograd.grad(layer.auxiliary, tuple(own.values()), retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(loss, tuple(own.values())))
    assert all(bool(g.any()) for g in got)
    # Neither loss reaches the parameters of the other.
    alone = torch.autograd.grad(
        layer.auxiliary, tuple(others.values()), retain_graph=True, allow_unused=True
    )
    assert set(alone) == {None}
    weight = torch.randn_like(y)
    everything = (*others.values(), *own.values())
    got = torch.autograd.grad((y * weight).sum(), everything, allow_unused=True)
    assert set(got[len(others) :]) == {None}
    torch.testing.assert_close(
        got[: len(others)], torch.autograd.grad((want * weight).sum(), tuple(others.values()))
    )


def test_losses_are_kept_in_training_only() -> None:
    layer = made()
    x, rope = tokens()
    layer(x, rope=rope)
    assert layer.auxiliary is not None and copy.deepcopy(layer).auxiliary is None
    with torch.no_grad():
        layer(x, rope=rope)
    assert layer.auxiliary is None
    layer.eval()(x, rope=rope)
    assert layer.auxiliary is None
    silent = made(index_weight=0.0)
    silent(x, rope=rope)
    assert silent.auxiliary is None


def test_the_single_head_ranks_by_products_of_x() -> None:
    layer = made(indexer="single", index_heads=None, q_lora_rank=None)
    assert {n for n, _ in layer.indexer.named_parameters()} == {"wq_b.weight", "wk.weight"}
    x, rope = tokens()
    scores = (x @ layer.indexer.wq_b.weight.T) @ (x @ layer.indexer.wk.weight.T).transpose(1, 2)
    for activation, tie in (("relu", "first"), (None, "first"), ("relu", "recent")):
        layer.config = replace(layer.config, index_activation=activation, index_tie=tie)
        ranked = scores if activation is None else scores.relu()
        if tie == "recent":  # equal scores are zeros here: a later one a little above
            ranked = ranked + 1e-9 * torch.arange(17)
        want, _ = dense(layer, x, rope, seen_by(ranked, 5))
        torch.testing.assert_close(layer(x, rope=rope), want)


def test_interleaved_rotation_of_the_indexer_alone() -> None:
    """Interleaved rotation with permuted weights equals half-split rotation."""
    layer, other = made(), made(index_rope_interleaved=True)
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6])
    own = layer.indexer
    with torch.no_grad():
        other.load_state_dict(layer.state_dict())
        other.indexer.wk.weight.copy_(own.wk.weight[order])
        other.indexer.wq_b.weight.copy_(
            own.wq_b.weight.unflatten(0, (2, 7))[:, order].flatten(0, 1)
        )
    x, rope = tokens()
    torch.testing.assert_close(other(x, rope=rope), layer(x, rope=rope))


@torch.no_grad()
def test_weights_and_outputs_of_transformers() -> None:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as theirs

    config = DeepseekV32Config(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=1,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        index_n_heads=16,  # few scores are 0, whose order is arbitrary there
        index_head_dim=7,
        index_topk=5,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    attention = theirs.DeepseekV32Attention(config, 0).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = made(index_heads=16).eval()
    layer.load_state_dict(attention.state_dict())
    x, rope = tokens()
    mask = torch.full((17, 17), -torch.inf, dtype=torch.float64).triu(1).expand(2, 1, 17, 17)
    both = tuple(torch.cat([t, t], -1).double().expand(2, -1, -1) for t in rope)
    want, _ = attention(x, both, mask)
    # Their softmax is in fp32.
    torch.testing.assert_close(layer(x, rope=rope).float(), want.float())


@torch.no_grad()
def test_the_state_goes_back_is_restored_and_counts_its_bytes() -> None:
    layer = made().eval()
    x, rope = tokens()
    full = layer(x, rope=rope)
    state = layer.new_state(2, 17)
    assert state.nbytes == 2 * 17 * (8 + 4 + 7) * 8

    def part(x, state, a, b):
        return layer(x[:, a:b], state=state, rope=tuple(t[a:b] for t in rope))

    part(x, state, 0, 9)
    saved = copy.deepcopy(state.state_dict())
    part(x, state, 12, 15)
    state.crop(9)
    parts = [part(x, state, 9, 10), part(x, state, 10, 17)]
    torch.testing.assert_close(torch.cat(parts, 1), full[:, 9:])
    other = layer.new_state(2, 17)
    other.load_state_dict(saved)
    assert other.length == 9
    other.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(part(x[[1, 0]], other, 9, 17), full[[1, 0], 9:])
    with pytest.raises(ValueError, match=r"DSAState: state must have the keys latents, index"):
        other.load_state_dict(saved["latents"])


@torch.no_grad()
def test_a_decoder_generates_what_it_computes_at_once() -> None:
    torch.manual_seed(0)
    model = TRAINED["dsa"].build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    prompt = torch.randint(256, (1, 40))
    out = generate(model, prompt, 6)
    assert torch.equal(out[:, 40:], model(out[:, :-1]).argmax(-1)[:, 39:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk": 0}, "index_topk and index_heads must be >= 1"),
        ({"indexer": "double"}, "indexer must be one of"),
        ({"stage": "warm"}, "stage must be one of"),
        ({"index_tie": "last"}, "index_tie must be one of"),
        ({"index_activation": "gelu"}, 'index_activation must be "relu" or None'),
        (
            {"index_dim": 3},
            "index_dim must be at least qk_rope_dim, got index_dim=3, qk_rope_dim=4",
        ),
        ({"indexer": "single"}, 'indexer="single" has one head, got index_heads=2'),
        ({"window_size": (3, 0)}, "must have causal=True and no window"),
    ],
)
def test_wrong_fields(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"DeepSeekSparseAttention: {message}")):
        made(**fields)


def test_wrong_arguments() -> None:
    layer, (x, rope) = made(), tokens()
    for error, message, given in (
        (ValueError, "mask must be None", {"mask": torch.ones(1, dtype=torch.bool), "rope": rope}),
        (ValueError, "rope must be given if and only if", {}),
        (TypeError, "state must be a DSAState, got KVC", {"state": KVCache(2, 9, 1, 2)}),
    ):
        with pytest.raises(error, match=f"DeepSeekSparseAttention: {message}"):
            layer(x, **given)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 24\), got x.shape=\(2, 3\)"):
        layer(x[:, :3, 0])
