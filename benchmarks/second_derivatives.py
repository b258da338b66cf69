"""Times second derivatives and forward mode against a backward, and their memory.

    python benchmarks/second_derivatives.py            # prints a table, 2,048 and 16,384 tokens
    python benchmarks/second_derivatives.py --publish  # writes it to docs/recipes.md
    python benchmarks/second_derivatives.py --tokens 4096 --cases attention "delta rule"

Each case runs in a process of its own. `second` is the gradient of |gradient|^2, as for a gradient
penalty or a Hessian-vector product, without the first gradient; `jvp` is torch.func.jvp of the
call. The memory is what all of them add to the peak of the process after a run of 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

PAGE = Path(__file__).parents[1] / "docs/recipes.md"
BEGIN, END = "<!-- second derivatives -->\n", "<!-- end of second derivatives -->\n"
HEADS, WIDTH = 8, 64
#: Name -> shapes of further inputs besides q, k and v, after (B, T, H).
CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "attention": (),
    "linear attention": (),
    "gated linear attention": ((WIDTH,),),
    "gated delta rule": ((), ()),
    "Kimi delta attention": ((WIDTH,), ()),
    "RWKV-7": ((WIDTH,), (WIDTH,), (WIDTH,)),
    "selective scan": (),
}


def call(name: str) -> Callable[..., Any]:
    """Returns the function of a case."""
    from omniattn import functional as F

    calls: dict[str, Callable[..., Any]] = {
        "attention": lambda q, k, v: F.attention(q, k, v, causal=True),
        "linear attention": lambda q, k, v: F.linear_attention(q, k, v)[0],
        "gated linear attention": lambda q, k, v, g: F.gated_linear_attention(q, k, v, -g.abs())[0],
        "gated delta rule": lambda q, k, v, g, b: F.gated_delta_rule(
            q, k, v, -g.abs(), b.sigmoid(), l2norm=True
        )[0],
        "Kimi delta attention": lambda q, k, v, g, b: F.kimi_delta_attention(
            q, k, v, -g.abs(), b.sigmoid(), l2norm=True
        )[0],
        "RWKV-7": lambda q, k, v, g, a, b: F.rwkv7(q, -g.abs(), k, v, a / 64, b / 8)[0],
        "selective scan": lambda u, dt, z, A, B, C: F.selective_scan(
            u, dt.sigmoid(), -A.abs(), B, C, z=z
        )[0],
    }
    return calls[name]


def measure(name: str, tokens: int) -> dict[str, float]:
    """Measures one case in this process."""
    import torch

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        heads = (1, tokens, HEADS)
        if name == "selective scan":
            width = HEADS * WIDTH
            shapes = [(1, tokens, width)] * 3 + [(width, 16)] + [(1, tokens, 16)] * 2
        else:
            shapes = [(*heads, WIDTH)] * 3 + [(*heads, *rest) for rest in CASES[name]]
        return tuple(torch.randn(s).requires_grad_() for s in shapes)

    function = call(name)

    def run(tokens: int) -> dict[str, float]:
        x = inputs(tokens)
        times = {}
        loss = function(*x).square().sum()
        start = time.perf_counter()
        first = torch.autograd.grad(loss, x)
        times["backward"] = time.perf_counter() - start
        first = torch.autograd.grad(function(*x).square().sum(), x, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        start = time.perf_counter()
        torch.autograd.grad(penalty, x)
        times["second"] = time.perf_counter() - start
        plain = tuple(t.detach() for t in x)
        start = time.perf_counter()
        torch.func.jvp(function, plain, plain)
        times["jvp"] = time.perf_counter() - start
        return times

    run(128)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = run(tokens)
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for _ in range(2):
        best = {n: min(best[n], t) for n, t in run(tokens).items()}
    return best | {"mib": mib}


def table(rows: list[tuple[str, int, dict[str, float]]]) -> str:
    lines = [
        "| case | tokens | backward, ms | second / backward | jvp / backward | added memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens, found in rows:
        ms = found["backward"] * 1e3
        ratios = " | ".join(f"{found[n] / found['backward']:.1f}" for n in ("second", "jvp"))
        lines.append(f"| {name} | {tokens:,} | {ms:.0f} | {ratios} | {found['mib']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]))))
        return
    rows = []
    for tokens in given.tokens:
        for name in tqdm(given.cases, desc=f"{tokens:,} tokens", leave=False):
            command = [sys.executable, __file__, "--one", name, str(tokens)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append((name, tokens, json.loads(done.stdout)))
    text = table(rows)
    print(text)
    if given.publish:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
