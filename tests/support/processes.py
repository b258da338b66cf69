"""Tests on several processes, each a run of the test's own file: file.py work rank ranks port."""

import os
import socket
import subprocess
import sys
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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run(file, work, ranks, stdout=None, timeout=120):
    """Runs `work` on all ranks; every process must succeed within `timeout` seconds."""
    port = free_port()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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
