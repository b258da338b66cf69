"""Times context_parallel on two processes of one core each against one process, with a timeline.

    torchrun --nproc-per-node 2 benchmarks/processes/ranks.py    # prints a table

`--publish` also writes docs/ranks.csv and docs/ranks.png.

A turn runs forward and backward once on the first rank, while the others wait, and once on all; of
the turns, the least times count. `share` is the time of two processes by half that of one, 1 where
nothing is lost; `work` is the same of the busiest rank's CPU time, in which waiting is not included
and which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from omniattn import functional
from omniattn.distributed import context_parallel, messages
from omniattn.figures import new_figure, save_figure

DOCS = Path(__file__).parents[2] / "docs"
HEADS, DIM = 4, 64
#: Largest share that issue 47 allows.
GOALS = {"ring attention": 1.15, "gated linear attention": 1.10}
FIELDS = ("form", "tokens", "one_s", "two_s", "share", "work", "waiting_s", "goal", "load")
#: Messages: the functions that start them or wait for them.
MESSAGES = {
    "send": [(messages.Ring, "start"), (messages.Outbox, "send")],
    "wait": [(messages.Ring, "wait"), (messages, "receive")],
    "collective": [(dist, "all_gather"), (dist, "all_to_all_single")],
}
COLORS = {"compute": "tab:blue", "send": "tab:green", "wait": "tab:red", "collective": "tab:orange"}
Event = tuple[str, float, float]


def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out: Tensor = functional.attention(q, k, v, causal=True)
    return out


def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return functional.gated_linear_attention(q, k, v, g)[0]


FORMS: dict[str, Callable[..., Tensor]] = {
    "ring attention": attend,
    "gated linear attention": recur,
}


@contextmanager
def stamps(events: list[Event]) -> Iterator[None]:
    """Records when messages begin and end."""

    def stamped(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = function(*args, **kwargs)
            events.append((kind, begin, time.perf_counter()))
            return out

        return timed

    patches = [
        mock.patch.object(owner, name, stamped(kind, getattr(owner, name)))
        for kind, places in MESSAGES.items()
        for owner, name in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def step(form: str, tensors: list[Tensor]) -> tuple[float, float]:
    """Runs forward and backward; returns wall and CPU seconds."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    wall, cpu = time.perf_counter(), time.process_time()
    FORMS[form](*leaves).sum().backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(form: str, tokens: int, repeats: int) -> tuple[dict[str, Any], list[list[Event]]]:
    """Returns the row of the table, and the events of the fastest turn of each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    whole = [torch.randn(1, tokens, HEADS, DIM) for _ in range(3)]
    whole.append(-torch.rand(1, tokens, HEADS, DIM) / 16)
    one: list[tuple[float, float]] = []
    turns: list[tuple[float, float, list[list[Event]]]] = []
    for turn in tqdm(range(repeats + 1), desc=form, disable=rank > 0):
        if rank == 0:
            one.append(step(form, whole))
        with context_parallel(mesh) as region:
            mine = [region.shard(t) for t in whole]
            events: list[Event] = []
            dist.barrier()
            begin = time.perf_counter()
            with stamps(events):
                wall, cpu = step(form, mine)
        events = [(kind, a - begin, b - begin) for kind, a, b in events]
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, (wall, cpu, [("compute", 0.0, wall), *events]))
        if turn:  # the first one loads and chooses kernels
            walls, cpus, found = zip(*every, strict=True)
            turns.append((max(walls), max(cpus), list(found)))
    if rank:
        return {}, []
    wall, _, fastest = min(turns)
    alone, work = (min(times) for times in zip(*one[1:], strict=True))
    waiting = max(sum(b - a for kind, a, b in e if kind != "compute") for e in fastest)
    share = wall * ranks / alone
    busiest = min(cpu for _, cpu, _ in turns) * ranks / work
    numbers = (alone, wall, share, busiest, waiting, GOALS[form], os.getloadavg()[0])
    row = (form, tokens, *(round(n, 3) for n in numbers))
    return dict(zip(FIELDS, row, strict=True)), fastest


def draw(found: dict[str, list[list[Event]]], path: Path) -> None:
    """Draws what each rank did when."""
    figure = new_figure(figsize=(9, 1.5 + 1.3 * len(found)))
    grid = figure.subplots(len(found), 1, squeeze=False).flatten()
    for axes, (form, ranks) in zip(grid, found.items(), strict=True):
        for rank, events in enumerate(ranks):
            for kind, a, b in events:
                height = 0.8 if kind == "compute" else 0.5
                span = (rank - height / 2, height)
                axes.broken_barh([(a, b - a)], span, color=COLORS[kind], linewidth=0)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.set_title(f"{form}: forward and backward", fontsize="medium")
        axes.invert_yaxis()
    grid[-1].set_xlabel("seconds")
    for kind, color in COLORS.items():
        grid[0].plot([], [], color=color, linewidth=6, label=kind)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3, help="turns after the first")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--publish", action="store_true", help="write docs/ranks.{csv,png}")
    parser.add_argument("--out", type=Path, help="draw the timeline into this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    rows, found = [], {}
    for form in given.forms:
        row, events = measure(form, given.tokens, given.repeats)
        rows.append(row)
        found[form] = events
    if dist.get_rank() == 0:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
        if given.publish:
            with open(DOCS / "ranks.csv", "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        path = DOCS / "ranks.png" if given.publish else given.out
        if path is not None:
            draw(found, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
