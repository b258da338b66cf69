"""Trains one step of causal language models at lengths up to 1M tokens, and draws time and memory.

    python benchmarks/long_context.py                     # prints a table, 1k to 1M tokens
    python benchmarks/long_context.py --publish           # also docs/long_context.{csv,png}
    python benchmarks/long_context.py --lengths 1024 65536 --mixers window

The model has 4 layers of width 64 and checkpoints them; the loss is computed without logits. Each
length runs in a process of its own, and counts the step with AdamW, after one of 1,024 tokens that
loads and chooses kernels. A mixer stops before a step that would take longer than `--limit`.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

DOCS = Path(__file__).parents[1] / "docs"
LENGTHS = [2**n for n in range(10, 21, 2)]
#: Name -> growth of the time with the length.
MIXERS = {"full attention": 2, "window of 1,024": 1, "gated delta rule": 1, "Mamba-2": 1}
FIELDS = ("mixer", "tokens", "seconds", "us_per_token", "peak_mib", "loss")


def step(mixer: str, tokens: int) -> dict[str, object]:
    """Trains one step, and returns the row of the table."""
    import torch

    from omniattn.models import BlocksConfig
    from omniattn.modules import (
        Attention,
        DecoderBlock,
        GatedDeltaNet,
        GatedMLP,
        Mamba2,
        RMSNorm,
        RotaryEmbedding,
    )

    dim = 64
    mixers = {
        "full attention": Attention.Config(dim, 2),
        "window of 1,024": Attention.Config(dim, 2, window_size=(1023, 0)),
        "gated delta rule": GatedDeltaNet.Config(dim, 2),
        "Mamba-2": Mamba2.Config(dim, d_state=32, headdim=32),
    }
    block = DecoderBlock.Config(mixers[mixer], GatedMLP.Config(dim, 2 * dim), RMSNorm.Config(dim))
    rope = RotaryEmbedding.Config(dim // 2) if "attention" in mixer or "window" in mixer else None
    torch.manual_seed(0)
    config = BlocksConfig(256, dim, 4, gradient_checkpointing=True, blocks=(block,), rope=rope)
    model = config.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(length: int) -> float:
        given = torch.randint(256, (1, length + 1))
        loss = model(given[:, :-1], given[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    train(min(tokens, 1024))
    begin = time.perf_counter()
    loss = train(tokens)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    values = (mixer, tokens, round(seconds, 4), round(seconds / tokens * 1e6, 3), round(peak), loss)
    return dict(zip(FIELDS, values, strict=True))


def measure(mixers: list[str], lengths: list[int], limit: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with tqdm(total=len(mixers) * len(lengths)) as bar:
        for mixer in mixers:
            expected, last = 0.0, 0
            for tokens in sorted(lengths):
                bar.set_description(f"{mixer}, {tokens:,} tokens")
                if last and expected * (tokens / last) ** MIXERS[mixer] > limit:
                    bar.write(f"{mixer}: {tokens:,} tokens would take over {limit:.0f} s")
                    bar.update()
                    continue
                command = [sys.executable, __file__, "--step", mixer, str(tokens)]
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode:
                    raise SystemExit(f"{mixer}, {tokens:,} tokens: {run.stderr or run.returncode}")
                rows.append(json.loads(run.stdout))
                expected, last = float(rows[-1]["seconds"]), tokens
                bar.update()
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        own = [row for row in rows if row["mixer"] == mixer]
        lengths = [row["tokens"] for row in own]
        time_axes.plot(lengths, [row["us_per_token"] for row in own], "o-", label=mixer)
        memory_axes.plot(lengths, [row["peak_mib"] for row in own], "o-", label=mixer)
    time_axes.set(title="Time of a training step per token", ylabel="microseconds per token")
    memory_axes.set(title="Peak memory of the process", ylabel="MiB")
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens of the sequence", yscale="log")
        axes.grid(alpha=0.3)
    time_axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a step")
    parser.add_argument("--publish", action="store_true", help="writes docs/long_context.*")
    parser.add_argument("--step", nargs=2, metavar=("MIXER", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(step(args.step[0], int(args.step[1]))))
        return
    rows = measure(args.mixers, args.lengths, args.limit)
    for row in rows:
        print("{mixer:17} {tokens:9,} tokens {seconds:9.2f} s {peak_mib:7,} MiB".format(**row))
    if args.publish:
        with open(DOCS / "long_context.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        draw(rows, DOCS / "long_context.png")


if __name__ == "__main__":
    main()
