"""Attention with forget gates, scores times s log n, queries of low rank, stick-breaking."""

import math

import pytest
import torch

from omniattn.functional import attention, forgetting_attention, stick_breaking_attention
from omniattn.modules import Attention, KVCache, RollingCache

F64 = torch.float64


def made(**options):
    torch.manual_seed(0)
    layer = Attention(24, 4, 2, init_std=0.5, dtype=F64, **options)
    x = torch.randn(2, 9, 24, dtype=F64)
    heads = (p(x).unflatten(-1, (-1, 6)) for p in (layer.k_proj, layer.v_proj))
    return layer, x, *heads


def test_forget_gates():
    layer, x, k, v = made(forget_gate=True)
    torch.nn.init.normal_(layer.f_proj.bias)
    q = layer.q_proj(x).unflatten(-1, (4, 6))
    log_f = torch.nn.functional.logsigmoid(layer.f_proj(x))
    want = layer.o_proj(forgetting_attention(q, k, v, log_f, backend="reference").flatten(-2))
    torch.testing.assert_close(layer(x), want)
    nested = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.tensor([0, 9, 18]))
    torch.testing.assert_close(layer(nested).values(), want.flatten(0, 1))


@torch.no_grad()
def test_states_with_gates():
    layer, x, *_ = made(forget_gate=True)
    state = layer.new_state(2, 9)
    want = torch.cat([layer(x[:, :4], state=state), layer(x[:, 4:], state=state)], 1)
    again = layer.new_state(2, 9)
    again.load_state_dict(state.state_dict())
    for cache in (state, again):
        cache.crop(5)
        torch.testing.assert_close(layer(x[:, 5:], state=cache), want[:, 5:])
    with pytest.raises(TypeError, match=r"must be a ForgettingCache .*got type.state.=KVCache"):
        layer(x, state=KVCache(2, 9, 2, 6, dtype=F64))
    with pytest.raises(ValueError, match="log_f must have shape"):
        again.load_state_dict(state.state_dict() | {"log_f": torch.zeros(2, 5, 3)})
    with pytest.raises(ValueError, match="forget_gate must be False for a rolling cache"):
        layer.new_state(2, 9, rolling=True)


@pytest.mark.parametrize("window", [-1, 3])
def test_scalable_softmax(window):
    layer, x, k, v = made(log_scale=True, window_size=(window, 0 if window > 0 else -1))
    torch.nn.init.normal_(layer.log_scale)
    q = layer.q_proj(x).unflatten(-1, (4, 6))
    n = [min(i + 1, window + 1) if window > 0 else i + 1 for i in range(9)]
    logs = torch.tensor([math.log(count) for count in n], dtype=F64)
    q = q * (layer.log_scale.double()[:, None] * logs[:, None, None])
    want = attention(q, k, v, causal=True, window_size=layer.config.window_size)
    torch.testing.assert_close(layer(x), layer.o_proj(want.flatten(-2)))


def test_queries_of_low_rank():
    layer, x, k, v = made(q_rank=5)
    latent = torch.nn.functional.rms_norm(x @ layer.q_down.weight.T, (5,), eps=1e-6)
    q = (latent @ layer.q_proj.weight.T).unflatten(-1, (4, 6))
    want = attention(q, k, v, causal=True)
    torch.testing.assert_close(layer(x), layer.o_proj(want.flatten(-2)))


@pytest.mark.parametrize("current", [False, True])
def test_stick_breaking(current):
    layer, x, k, v = made(normalizer="stick_breaking", attend_current=current)
    q = layer.q_proj(x).unflatten(-1, (4, 6))
    options = {"attend_current": current, "backend": "reference"}
    want = layer.o_proj(stick_breaking_attention(q, k, v, **options).flatten(-2))
    torch.testing.assert_close(layer(x), want)
    even = torch.arange(9) % 2 == 0
    masked = layer(x, mask=even.expand(9, 9))
    torch.testing.assert_close(layer(x, mask=lambda b, h, q, k: k % 2 == 0), masked)
    state = layer.new_state(2, 9, dtype=F64)
    with torch.no_grad():
        steps = torch.cat([layer(token, state=state) for token in x.split(1, 1)], 1)
    torch.testing.assert_close(steps, want)


@torch.no_grad()
def test_stick_breaking_needs_keys_in_order():
    layer, x, *_ = made(normalizer="stick_breaking", window_size=(3, 0), attend_current=False)
    state = layer.new_state(2, 9, rolling=True)
    steps = torch.cat([layer(token, state=state) for token in x.split(1, 1)], 1)
    torch.testing.assert_close(steps, layer(x))
    unsorted = RollingCache(2, 4, 2, 6, dtype=F64)
    with pytest.raises(ValueError, match="must be sorted by position"):
        layer(x[:, :1], state=unsorted)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attend_current": False, "causal": False}, "attend_current=False needs causal=True"),
        ({"normalizer": "stick_breaking", "sinks": True}, "sinks need softmax"),
        ({"normalizer": "stick_breaking", "norm_n": 3}, "norm_n needs sigmoid"),
        ({"log_scale": True, "head_scale": True}, "log_scale needs causal=True and no other"),
        ({"log_scale": True, "causal": False}, "log_scale needs causal=True"),
        ({"forget_gate": True, "causal": False}, "forget_gate needs causal=True and softmax"),
        ({"forget_gate": True, "alibi": 8.0}, "forget_gate needs causal=True and softmax"),
        ({"forget_gate": True, "sinks": True}, "forget_gate needs causal=True and softmax"),
        ({"query_sinks": True, "sinks": True}, "query_sinks replace sinks"),
        ({"query_sinks": True, "normalizer": "softpick"}, "query_sinks need softmax"),
    ],
)
def test_options_that_exclude_each_other(options, text):
    with pytest.raises(ValueError, match=f"^Attention: {text}"):
        Attention.Config(8, 2, **options)


def test_terms_of_positions_exclude_forget_gates():
    with pytest.raises(ValueError, match="must be None with forget_gate=True"):
        made(forget_gate=True)[0](torch.zeros(1, 3, 24, dtype=F64), alibi_slopes=torch.ones(4))


@torch.no_grad()
def test_sinks_of_queries():
    """exp(sink_proj(x)) joins the denominator of each query and head."""
    torch.manual_seed(0)
    m = Attention(8, 4, 2, query_sinks=True, init_std=0.7, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (m.q_proj, m.k_proj, m.v_proj))
    logits = q @ k.repeat_interleave(2, 1).mT / 2**0.5
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    powers = logits.exp() * seen
    total = powers.sum(-1, keepdim=True) + m.sink_proj(x).mT[..., None].exp()
    heads = powers / total @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(m(x), m.o_proj(heads.transpose(1, 2).flatten(2)))
    rows = [x[0, :4], x[1]]
    found = m(torch.nested.nested_tensor(rows, layout=torch.jagged)).unbind()
    for row, alone in zip(found, rows, strict=True):
        torch.testing.assert_close(row, m(alone[None])[0])
    cache = m.new_state(2, 6)
    steps = torch.cat([m(x[:, t : t + 1], cache=cache) for t in range(6)], 1)
    torch.testing.assert_close(steps, m(x))
