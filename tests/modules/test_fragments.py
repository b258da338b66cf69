"""The code fragments of the sources, written anew from the specification, against our modules.

Each fragment is plain torch, as a reader of the sources would type it; where a source errs, its
fragment has the correction that the specification lists.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from omniattn import functional
from omniattn.models import BartConfig, GPT2Config, from_hf, generate
from omniattn.modules import Attention, DifferentialAttention, MoE, RotaryEmbedding
from omniattn.training import WarmupCosine, clip_gradients

B, T, DIM = 2, 9, 48


@pytest.fixture(autouse=True)
def _fp64():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def apply_rope(x, base=10000.0):
    """Rotates the pairs (2i, 2i + 1) of x (B, H, T, D) by the angles p base^(-2i / D)."""
    length, size = x.shape[-2:]
    frequency = base ** (-torch.arange(0, size, 2).double() / size)
    angle = torch.arange(length).double()[:, None] * frequency
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(pairs, -1).flatten(-2)


class GroupedQueryAttention(nn.Module):
    """Causal attention whose key and value heads serve groups of query heads."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, rotated=False):
        length = x.shape[1]
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if rotated:
            q, k = apply_rope(q), apply_rope(k)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def diff_attention(q1, k1, q2, k2, v):
    """Difference of two softmax maps times v: (B, H, T, D), v (B, H, T, 2 D)."""
    hidden = torch.ones(q1.shape[-2], q1.shape[-2], dtype=torch.bool).triu(1)
    maps = [
        (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
        .masked_fill(hidden, -math.inf)
        .softmax(-1)
        for q, k in ((q1, k1), (q2, k2))
    ]
    return (maps[0] - maps[1]) @ v


class MoELayer(nn.Module):
    """Experts of which each token uses the top k, weighted by a softmax over their logits."""

    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        values, chosen = self.router(tokens).topk(self.top_k, -1)
        weights = values.softmax(-1)
        out = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += weights[rows, place, None] * down(F.gelu(up(tokens[rows])))
        return out.view_as(x)


def assert_same(actual, expected, ours, theirs):
    torch.testing.assert_close(actual, expected)
    got, want = torch.autograd.grad(actual.sum(), ours), torch.autograd.grad(expected.sum(), theirs)
    torch.testing.assert_close(got, want)


def test_apply_rope():
    q, k = torch.randn(B, T, 4, 12), torch.randn(B, T, 2, 12)
    cos, sin = RotaryEmbedding(12)(torch.arange(T))
    found = functional.apply_rotary(q, k, cos.double(), sin.double(), interleaved=True)
    for ours, x in zip(found, (q, k), strict=True):
        # 1e-6: our table is rounded to fp32.
        wanted = apply_rope(x.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_attention(kv_heads):
    theirs, x = GroupedQueryAttention(DIM, 4, kv_heads), torch.randn(B, T, DIM, requires_grad=True)
    ours = Attention(DIM, 4, kv_heads, rope_interleaved=True)
    ours.load_state_dict(theirs.state_dict())
    weights = ([x, *module.parameters()] for module in (ours, theirs))
    assert_same(ours(x), theirs(x), *weights)
    cos, sin = RotaryEmbedding(DIM // 4)(torch.arange(T))
    rotated = ours(x, rope=(cos.double(), sin.double()))
    torch.testing.assert_close(rotated, theirs(x, rotated=True), rtol=1e-6, atol=1e-6)


def test_diff_attention():
    ours = DifferentialAttention(DIM, 2, depth=0, form="simple")
    x = torch.randn(B, T, DIM, requires_grad=True)
    q, k = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (ours.q_proj, ours.k_proj))
    v = ours.v_proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
    out = diff_attention(q[:, 0::2], k[:, 0::2], q[:, 1::2], k[:, 1::2], v)
    weights = [x, *ours.parameters()]
    assert_same(ours(x), ours.o_proj(out.transpose(1, 2).flatten(2)), weights, weights)


def test_moe_layer():
    theirs, x = MoELayer(DIM, 20, 6, 2), torch.randn(B, T, DIM, requires_grad=True)
    ours = MoE(DIM, 20, experts=6, top_k=2, activation="gelu")
    experts = [torch.stack([e.weight for e in part]) for part in (theirs.up, theirs.down)]
    ours.load_state_dict(
        {
            "gate.weight": theirs.router.weight,
            "experts.gate_up_proj": experts[0],
            "experts.down_proj": experts[1],
        }
    )
    assert_same(ours(x), theirs(x), [x, ours.gate.weight], [x, theirs.router.weight])


def test_calls_of_an_encoder_and_decoder():
    """`model(input_ids, labels=labels)` and `model.generate(input_ids)` of BART."""
    config = BartConfig(97, DIM, 1, 4, 40, max_positions=30)
    theirs = config.build().to_hf().eval()
    ours = from_hf(theirs)
    source, labels = torch.randint(3, 97, (B, 11)), torch.randint(3, 97, (B, 7))
    start = torch.full((B, 1), theirs.config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1)
    out = theirs(input_ids=source, labels=labels)
    torch.testing.assert_close(ours(source, shifted), out.logits)
    torch.testing.assert_close(ours(source, shifted, labels), out.loss)
    wanted = theirs.generate(
        *(source,), max_new_tokens=8, num_beams=4, eos_token_id=None, forced_eos_token_id=None
    )
    assert torch.equal(generate(ours, start, 8, source=source, num_beams=4), wanted)


def test_the_training_loop():
    """AdamW, warm-up and cosine to a floor, clipping; labels are shifted and -100 is ignored.

    The schedule of the source lacks its number of steps, and the named function has no floor.
    """
    steps, warmup, lr, floor = 6, 2, 1e-2, 1e-3
    ours = GPT2Config(vocab_size=97, dim=DIM, num_layers=1, num_heads=4, max_positions=T).build()
    theirs = ours.to_hf()
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    theirs_optimizer = torch.optim.AdamW(theirs.parameters(), **options)
    optimizer = torch.optim.AdamW(ours.parameters(), **options)
    schedule = WarmupCosine(optimizer, min_lr=floor, warmup=warmup, steps=steps)
    for step in range(steps):
        tokens = torch.randint(97, (B, T))
        labels = tokens.clone()
        labels[0, 4:] = -100

        rate = lr * step / warmup
        if step >= warmup:
            done = min(1.0, (step - warmup) / (steps - warmup))
            rate = floor + 0.5 * (lr - floor) * (1 + math.cos(math.pi * done))
        for group in theirs_optimizer.param_groups:
            group["lr"] = rate
        theirs_optimizer.zero_grad()
        logits = theirs(tokens).logits[:, :-1]
        wanted = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        theirs_optimizer.step()

        optimizer.zero_grad()
        loss = ours(tokens[:, :-1], labels[:, 1:])
        loss.backward()
        clip_gradients(ours.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(loss, wanted)
    for own, other in ours.config.counterpart.pairs(ours, theirs):
        torch.testing.assert_close(
            *(torch.cat([t.flatten() for t in side]) for side in (own, other))
        )
