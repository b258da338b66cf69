"""Tests on several processes, each a run of the test's own file: file.py work rank ranks port."""

import os
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


def start(rank, ranks, port, timeout=timedelta(minutes=1)):
    """Joins a gloo group whose collectives wait for a minute at most."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timeout)


def main(work):
    """Runs, in a process of `run`, the function in `work` that the command line names.

    It ends without Python's teardown: threads of gloo that still hold a tensor then may end the
    process with "terminate called without an active exception" (pytorch/pytorch pull 179291).
    """
    work[sys.argv[1]](*map(int, sys.argv[2:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def shared_store():
    """Yields the port of a store, and the environment of processes that meet there.

    As under torchrun, this process keeps the store, from before the others start until they have
    ended: no port is free in between, which a test that runs at the same time could take.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join(filter(None, sys.path))
    yield str(store.port), os.environ | {"PYTHONPATH": path, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run(file, work, ranks, stdout=None, timeout=120):
    """Runs `work` on all ranks; every process must succeed within `timeout` seconds."""
    with shared_store() as (port, env):
        processes = [
            subprocess.Popen(
                [sys.executable, file, work, str(rank), str(ranks), port],
                env=env,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
