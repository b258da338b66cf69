"""Rows of goals.py for recurrences: against chunk forms in torch, transformers, and loops.

The bound counts all products of the chunk form, including those within chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from baselines import BASELINES
from baselines.scan import slstm as slstm_loop
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from goal_rows.goal import BF16, PASSES, Provider, Row, called_once, provider, tensors
from goal_rows.products import CHANNEL_CHUNK, delta, low_rank, plain
from omniattn import functional, testing
from omniattn.ops.recurrence import decayed_sum
from omniattn.testing.spec import Function, Pass
from omniattn.testing.timing import once

LENGTH, HEADS = 2048, 8
#: Minimum share of the bound that a row must reach.
LEAST = {"forward": 0.6, "forward+backward": 0.55}
Named = dict[str, Tensor]


def inputs(length: int, dim: int, *names: str, batch: int = 1, heads: int = HEADS) -> Named:
    """Makes q and k with unit rows, v, and the named gates."""
    row, head = (batch, length, heads, dim), (batch, length, heads)
    q, k, v, w, a, scalar, u = tensors(row, row, row, row, row, head, (heads, dim))
    x = F.normalize(a, dim=-1)
    made = {
        "g": F.logsigmoid(scalar + 3),
        "channels": F.logsigmoid(w + 3),
        "beta": scalar.sigmoid(),
        "w": -torch.exp(w - 1),
        "u": u,
        "a": -x,
        "b": x * w.sigmoid(),
    }
    chosen = {"g" if name == "channels" else name: made[name] for name in names}
    return {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v} | chosen


def _read(named: Named) -> Named:
    """Renames q to r, as in RWKV."""
    return {"r" if name == "q" else name: t for name, t in named.items()}


def best_chunk(pass_: Pass, named: Named, function: Function, sizes: tuple[int, ...]) -> Provider:
    """Returns the chunk form with the fastest chunk size on this machine."""

    def seconds(run: Provider) -> float:
        run()
        return min(once(run, 1) for _ in range(2))

    return min((provider(pass_, named, function, chunk=size) for size in sizes), key=seconds)


def _sums(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[tuple[Tensor, ...]]:
    options = None, None, 0
    keys = decayed_sum(k, v, g, *options, False, False)
    return [keys, decayed_sum(q, v, g, *options, True, False)]


def rank_rows() -> Iterator[Row]:
    """Yields rows of the work of a rank of context parallelism besides its tokens' recurrence.

    It is the sums of states and of their gradients. Decays that soon are 0 end a sum early.
    """
    q, k, v, g = tensors(*[(1, 8192, 4, 64)] * 4)
    for name, decay in (("slow", 1e-5), ("fast", 0.03)):
        named = {"q": q, "k": k, "v": v, "g": -decay * g.abs()}
        yield Row(
            f"sums of gated_linear_attention N8192 H4 D64 {name} decays",
            "forward+backward",
            partial(_sums, **named),
            provider("forward+backward", named, functional.gated_linear_attention),
            "the recurrence of these tokens",
            goal=0.1,
        )


def chunk_rows() -> Iterator[Row]:
    """Recurrences without a delta rule, against torch's chunk form with the best chunk size."""
    shape = (1, LENGTH, HEADS, 64)
    for op, names, sizes, chunk, forward in (
        ("linear_attention", (), (32, 64, 128, 256), 32, 8),
        ("gated_linear_attention", ("channels",), (8, 16, 32), CHANNEL_CHUNK, 6),
        ("retention", (), (32, 64, 128, 256), 32, 6),
    ):
        named = inputs(LENGTH, 64, *names)
        for pass_ in PASSES:
            yield Row(
                f"{op} N{LENGTH} H{HEADS} D64",
                pass_,
                provider(pass_, named, getattr(functional, op)),
                best_chunk(pass_, named, BASELINES[op]["aten"], sizes),
                "torch's chunk form, best size",
                1 / (forward if pass_ == "forward" else 6),
                flops=plain(shape, 64, chunk)[pass_],
                least=LEAST[pass_],
                same=True,
            )


def delta_rows() -> Iterator[Row]:
    """Delta rules against transformers' chunk form, and the others against the gated one."""
    ops = {
        "gated_delta_rule": (("g", "beta"), 32),
        "delta_rule": (("beta",), 32),
        "kimi_delta_attention": (("channels", "beta"), CHANNEL_CHUNK),
    }
    for dim, goals in ((64, (10, 14)), (128, (6.5, 8.5))):
        for pass_, times in zip(PASSES, goals, strict=True):
            gated = provider(pass_, inputs(LENGTH, dim, "g", "beta"), functional.gated_delta_rule)
            for op, (names, chunk) in ops.items():
                named = inputs(LENGTH, dim, *names)
                theirs = provider(pass_, named, BASELINES[op]["hf"])
                run = provider(pass_, named, getattr(functional, op))
                row = Row(
                    f"{op} N{LENGTH} H{HEADS} D{dim}",
                    pass_,
                    run,
                    theirs,
                    "transformers' chunks",
                    1 / times,
                    flops=delta((1, LENGTH, HEADS, dim), dim, chunk)[pass_],
                    least=LEAST[pass_],
                    same=True,
                )
                slow = op == "kimi_delta_attention"  # takes seconds: loops over the rows of a chunk
                yield replace(row, **called_once(theirs)) if slow else row
                if op != "gated_delta_rule":
                    yield Row(row.name, pass_, run, gated, "gated_delta_rule", 1.1)


def tile_rows() -> Iterator[Row]:
    """Gated delta rule in bf16 on AMX tiles, against transformers' chunks and our vector code."""
    if "amx_bf16" not in testing.isas():
        tqdm.write("recurrence tiles: no rows, the machine has no AMX")
        return

    def on_vectors(run: Provider) -> object:
        with testing.isa("avx512"):
            return run()

    for dim, goals in ((64, (10, 14)), (128, (13, 17))):
        named = inputs(LENGTH, dim, "g", "beta")
        named = {name: t if name == "g" else t.to(BF16) for name, t in named.items()}
        for pass_, times in zip(PASSES, goals, strict=True):
            run = provider(pass_, named, functional.gated_delta_rule)
            row = Row(
                f"tiles gated_delta_rule N{LENGTH} H{HEADS} D{dim}",
                pass_,
                run,
                provider(pass_, named, BASELINES["gated_delta_rule"]["hf"]),
                "transformers' chunks",
                1 / times,
                dtype=BF16,
                flops=delta((1, LENGTH, HEADS, dim), dim, 32)[pass_],
                same=True,
            )
            yield row
            yield replace(row, yardstick=partial(on_vectors, run), against="avx512", goal=1.0)


def gated_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = g.exp()[..., None] if g.dim() == 3 else g.exp()[..., None, None]
    state = torch.addcmul(k[..., None] * v[..., None, :], decay, state)
    return (q[..., None, :] @ state)[..., 0, :], state


def rwkv6_token(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    added = k[..., None] * v[..., None, :]
    out = (r[..., None, :] @ torch.addcmul(state, u[..., None], added))[..., 0, :]
    return out, torch.addcmul(added, w.exp()[..., None], state)


def rwkv7_token(
    r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, w: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    read = a[..., None, :] @ state
    state = w.exp()[..., None] * state + b[..., None] * read + k[..., None] * v[..., None, :]
    return (r[..., None, :] @ state)[..., 0, :], state


def loop(token: Callable[..., tuple[Tensor, Tensor]], *shared: str) -> Function:
    """Returns a loop over tokens, with all views made at once; `shared` have no time dimension."""

    def run(initial_state: Tensor | None = None, **named: Tensor) -> tuple[Tensor, Tensor]:
        constants = {name: named.pop(name) for name in shared}
        k, v = named["k"], named["v"]
        state = initial_state
        if state is None:
            state = k.new_zeros(*k[:, 0].shape, v.shape[-1])
        out = []
        for rows in zip(*(t.unbind(1) for t in named.values()), strict=True):
            o, state = token(**dict(zip(named, rows, strict=True)), state=state, **constants)
            out.append(o)
        return torch.stack(out, 1), state

    return run


def loop_rows() -> Iterator[Row]:
    """RWKV and sLSTM against loops over tokens."""
    pass_: Pass = "forward+backward"
    shape = (1, LENGTH, HEADS, 64)
    wkv = dict(zip("kv", tensors(*[(1, LENGTH, 1024)] * 2), strict=True))
    decay, bonus = tensors((1024,), (1024,))
    gates, matrix = tensors((1, LENGTH, 4, 4, 128), (4, 4, 128, 128))
    calls: dict[str, tuple[Named, Function, float]] = {
        "rwkv6": (
            _read(inputs(LENGTH, 64, "w", "u")),
            loop(rwkv6_token, "u"),
            plain(shape, 64, CHANNEL_CHUNK)[pass_],
        ),
        "rwkv7": (
            _read(inputs(LENGTH, 64, "a", "b", "w")),
            loop(rwkv7_token),
            low_rank(shape, 64)[pass_],
        ),
        "rwkv4": (
            {"w": decay.exp(), "u": bonus} | wkv,
            BASELINES["rwkv4"]["hf"],
            60.0 * LENGTH * 1024,
        ),
        "slstm": (
            {"x": gates, "r": matrix * 128**-0.5},
            slstm_loop,
            24.0 * LENGTH * 4 * 128**2,
        ),
    }
    for op, (named, theirs, flops) in calls.items():
        yield Row(
            f"{op} N{LENGTH}",
            pass_,
            provider(pass_, named, getattr(functional, op)),
            against="a loop over the tokens",
            goal=1 / 40,
            flops=flops,
            same=True,
            **called_once(provider(pass_, named, theirs)),
        )


def conv_rows() -> Iterator[Row]:
    """Causal convolution with SiLU, against torch's in its own layout, and against a copy."""
    steps, channels = 1024, 1536
    for batch, forward, both in ((1, 4, 5), (8, 10, 12)):
        x, weight, bias = tensors((batch, steps, channels), (channels, 4), (channels,))
        named = {"x": x, "weight": weight, "bias": bias}
        turned = named | {"x": x.mT.contiguous()}
        copied = torch.empty_like(x)

        def torch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y = F.conv1d(x, weight[:, None], bias, padding=3, groups=channels)
            return F.silu(y[..., :steps])

        for pass_, times, arrays in zip(PASSES, (forward, both), (2, 5), strict=True):
            run = provider(pass_, named, functional.causal_conv1d, activation="silu")
            name = f"causal_conv1d k4 B{batch} L{steps} E{channels}"
            bytes = float(arrays * x.nbytes)
            yield Row(
                name,
                pass_,
                run,
                provider(pass_, turned, torch_conv),
                "F.conv1d and silu",
                1 / times,
                bytes=bytes,
            )
            yield Row(
                name,
                pass_,
                run,
                lambda to=copied, x=x: to.copy_(x),
                "a copy of as many bytes",
                1 / 0.8,
                share=arrays / 2,
                bytes=bytes,
            )


def step_rows() -> Iterator[Row]:
    """One token of eight sequences with a state, against transformers' or torch's step."""
    (state,) = tensors((8, HEADS, 64, 64))
    wkv = dict(zip("kv", tensors(*[(8, 1, 1024)] * 2), strict=True))
    decay, bonus, sums = tensors((1024,), (1024,), (8, 3, 1024))
    calls: dict[str, tuple[Named, Function, str]] = {
        "gated_linear_attention": (
            inputs(1, 64, "channels", batch=8),
            loop(gated_token),
            "torch's",
        ),
        "gated_delta_rule": (
            inputs(1, 64, "g", "beta", batch=8),
            BASELINES["gated_delta_rule"]["hf"],
            "transformers'",
        ),
        "kimi_delta_attention": (
            inputs(1, 64, "channels", "beta", batch=8),
            BASELINES["kimi_delta_attention"]["hf"],
            "transformers'",
        ),
        "rwkv6": (_read(inputs(1, 64, "w", "u", batch=8)), loop(rwkv6_token, "u"), "torch's"),
        "rwkv7": (_read(inputs(1, 64, "a", "b", "w", batch=8)), loop(rwkv7_token), "torch's"),
        "rwkv4": ({"w": decay.exp(), "u": bonus} | wkv, BASELINES["rwkv4"]["hf"], "transformers'"),
    }
    for op, (named, theirs, whose) in calls.items():
        before = sums.abs() if op == "rwkv4" else state
        scale = {"scale": 1.0} if op == "gated_linear_attention" else {}
        given = named | {"initial_state": before}
        yield Row(
            f"{op} step B8",
            "forward",
            provider("forward", given, getattr(functional, op), **scale),
            provider("forward", given, theirs),
            f"{whose} step",
            1 / 15,
            bytes=2.0 * before.nbytes,
            same=True,
        )


def length_rows() -> Iterator[Row]:
    """Time and memory per token: constant from 1k to 64k tokens."""
    short, heads = 1024, 4
    for length in (4096, 16384, 65536):
        for op, names in (
            ("gated_linear_attention", ("channels",)),
            ("gated_delta_rule", ("g", "beta")),
        ):
            call, count = getattr(functional, op), plain if "linear" in op else delta
            for pass_ in PASSES:
                long, base = (inputs(t, 64, *names, heads=heads) for t in (length, short))
                yield Row(
                    f"{op} H{heads} D64 N{length}",
                    pass_,
                    provider(pass_, long, call),
                    provider(pass_, base, call),
                    f"the same at N{short}, per token",
                    1.1,
                    share=length / short,
                    flops=count(
                        (1, length, heads, 64), 64, CHANNEL_CHUNK if "linear" in op else 32
                    )[pass_],
                    memory=1.1,
                )


def rows() -> Iterator[Row]:
    yield from chunk_rows()
    yield from delta_rows()
    yield from loop_rows()
    yield from conv_rows()
    yield from step_rows()
