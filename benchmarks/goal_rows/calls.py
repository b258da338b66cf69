"""Rows of goals.py for calls on problems so small that the call itself takes most of the time.

python benchmarks/goals.py --group call --threads 1

Each row makes CALLS calls, so that entering a context and the loop of the timer do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hf_models import MODELS
from torch import Tensor
from torch.nn import functional as nnf

from goal_rows.goal import PASSES, Provider, Row, tensors
from omniattn import functional
from omniattn.modules import KVCache
from omniattn.testing.spec import Pass

CALLS = 100
#: Seconds that a step of a recurrence, or of attention to a cache, may take.
STEP = 15e-6
#: With gradients a call may take this many times its share of torch's time without.
WITH_GRADIENTS = 1.3
NEW_TOKENS = 16


def rows() -> Iterator[Row]:
    yield from _pairs()
    yield from _steps()
    yield from _generated()


def _pairs() -> Iterator[Row]:
    """Calls against torch's function for them."""
    heads = tensors(*[(1, 4, 2, 8)] * 3)
    # torch's layout: a transpose would take as long as the rest of the call.
    transposed = [t.transpose(1, 2) for t in heads]
    attend = nnf.scaled_dot_product_attention
    for pass_ in PASSES:
        run, yardstick = _call(pass_, heads, functional.attention), _call(pass_, transposed, attend)
        yield _row("attention", pass_, run, yardstick, "SDPA", 1.5)
    x, up, weight = tensors((4, 16), (4, 16), (16, 16))
    ones, zeros = torch.ones(16), torch.zeros(16)
    for name, given, ours, torchs, against, goal in (
        ("linear", [x, weight], functional.linear, nnf.linear, "torch's linear", 1.5),
        ("swiglu", [x, up], functional.swiglu, lambda g, u: nnf.silu(g) * u, "eager", 1.0),
        ("geglu", [x, up], functional.geglu, lambda g, u: nnf.gelu(g) * u, "eager", 1.0),
        ("rms_norm", [x, ones], functional.rms_norm, _rms_norm, "eager", 1.0),
        ("layer_norm", [x, ones, zeros], functional.layer_norm, _layer_norm, "eager", 1.0),
    ):
        for pass_ in PASSES:
            run, yardstick = (_call(pass_, given, function) for function in (ours, torchs))
            yield _row(name, pass_, run, yardstick, against, goal, same=True)


def _row(
    name: str,
    pass_: Pass,
    run: Provider,
    yardstick: Provider,
    against: str,
    goal: float,
    same: bool = False,
) -> Row:
    goal *= 1.0 if pass_ == "forward" else WITH_GRADIENTS
    return Row(f"{CALLS} calls {name}", pass_, run, yardstick, against, goal, same=same)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return nnf.rms_norm(x, (16,), weight, 1e-6)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nnf.layer_norm(x, (16,), weight, bias)


def _call(pass_: Pass, given: list[Tensor], function: Callable[..., Any]) -> Provider:
    if pass_ == "forward":
        return _without_gradients(lambda: function(*given))
    leaves = [t.clone().requires_grad_() for t in given]
    grad = torch.ones_like(function(*given))
    return _repeated(lambda: torch.autograd.grad(function(*leaves), leaves, grad))


def _steps() -> Iterator[Row]:
    """Steps of one token against a number of seconds."""
    q, k, v, state = tensors(*[(1, 1, 2, 8)] * 3, (1, 2, 8, 8))
    beta, g = torch.full((1, 1, 2), 0.5), torch.full((1, 1, 2), -0.1)
    A, rates = torch.full((2,), -1.0), g[..., None].expand(1, 1, 2, 8)
    B, C = k[:, :, :1], q[:, :, :1]
    cache = KVCache(1, 64, 2, 8)
    cache.append(*tensors(*[(1, 32, 2, 8)] * 2))
    lengths = torch.tensor([32])
    keys, values = cache.views()

    def cached() -> object:
        cache.crop(31)
        return functional.attention(q, *cache.append(k, v), causal=True)

    steps = {
        "delta_rule": lambda: functional.delta_rule(q, k, v, beta, initial_state=state),
        "gated_delta_rule": lambda: functional.gated_delta_rule(
            q, k, v, g, beta, initial_state=state
        ),
        "gated_linear_attention": lambda: functional.gated_linear_attention(
            q, k, v, rates, initial_state=state
        ),
        "ssd": lambda: functional.ssd(v, beta, A, B, C, dt_softplus=True, initial_state=state),
        "attention_cached": lambda: functional.attention_cached(
            q, keys, values, lengths, causal=True
        ),
        "attention to a KVCache": cached,
    }
    for name, step in steps.items():
        run = _without_gradients(step)
        yield Row(f"{CALLS} steps {name}", "forward", run, _waits, "15 us each", 1.0)


def _repeated(run: Provider) -> Provider:
    def calls() -> object:
        for _ in range(CALLS - 1):
            run()
        return run()

    return calls


def _without_gradients(run: Provider) -> Provider:
    repeated = _repeated(run)

    def calls() -> object:
        with torch.no_grad():
            return repeated()

    return calls


def _waits() -> None:
    end = time.perf_counter() + CALLS * STEP
    while time.perf_counter() < end:
        pass


def _generated() -> Iterator[Row]:
    """Tokens of patched models of transformers against the same models as they come."""
    for name in ("Llama", "Mamba-2", "Qwen3-Next"):
        run, yardstick = (_generation(name, patched) for patched in (True, False))
        row = f"HF {name} generates {NEW_TOKENS} tokens"
        yield Row(row, "forward", run, yardstick, "transformers", 0.8, same=True)


def _generation(name: str, patched: bool) -> Provider:
    import transformers

    import omniattn.hf

    transformers.logging.set_verbosity_error()
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if patched:
        omniattn.hf.patch(model)
    prompt = torch.arange(1, 5)[None]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
