"""A command on several processes, which torchrun starts."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omniattn.cli.errors import CommandError
from omniattn.training.peers import Peers, RankError, Watch
from omniattn.training.ranks import DIMENSIONS

T = TypeVar("T")


def launcher(args: argparse.Namespace) -> str:
    """Returns the command that starts as many processes as the options name."""
    count = math.prod(getattr(args, name) for name in DIMENSIONS)
    return "python" if count == 1 else f"torchrun --nproc-per-node {count}"


@contextlib.contextmanager
def on_mesh(args: argparse.Namespace) -> Iterator[DeviceMesh | None]:
    """Yields the mesh of the options, None for one process; only the first rank prints within.

    If a rank fails, ends or does not answer within --timeout, all others end and name it.

    Raises:
        CommandError: the number of processes is another one, or another rank failed.
    """
    sizes = {name: getattr(args, name) for name in DIMENSIONS if getattr(args, name) > 1}
    count, found = math.prod(sizes.values()), int(os.environ.get("WORLD_SIZE", "1"))
    if count != found:
        given = " ".join(f"--{name} {size}" for name, size in sizes.items()) or (
            f"no {', '.join(f'--{name}' for name in DIMENSIONS)}"
        )
        raise CommandError(
            f"{given}: the number of processes must be {count} ({launcher(args)} -m omniattn train "
            f"...), got {found}"
        )
    if count == 1:
        yield None
        return
    kind = torch.device(args.device).type
    if kind == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timeout)
    peers = Peers()
    try:
        with Watch(peers, "train"), peers.named("the run"):
            mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            stdout = sys.stdout if dist.get_rank() == 0 else io.StringIO()
            with contextlib.redirect_stdout(stdout):
                yield mesh
    except RankError as error:
        raise CommandError(f"{error}; --resume continues from the last checkpoint") from error
    finally:
        dist.destroy_process_group()


def from_first(mesh: DeviceMesh | None, make: Callable[[], T]) -> T:
    """Returns what `make` returns on the first rank; all ranks raise its CommandError."""
    if mesh is None:
        return make()
    found: list[T | CommandError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [make()]
        except CommandError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], CommandError):
        raise found[0]
    return found[0]  # type: ignore[return-value]
