"""python -m omniattn train on two hosts, as docs/distributed.md starts them: two network namespaces
of this machine, joined by a cable."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from omniattn.models.checkpoint import read_checkpoint

pytestmark = pytest.mark.slow

SMALL = ["--model", "llama-tiny", "--batch", "2", "--length", "32"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Hosts:
    """Two network namespaces; `names` are also those of the ends of the cable."""

    def __init__(self):
        self.names = [f"om{os.getpid()}-{n}" for n in range(2)]

    def start(self, n, processes, *arguments):
        """Starts torchrun on host n."""
        # The names of both hosts are this machine's, by which c10d could not tell them apart.
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
        known = ["--local-addr", ADDRESSES[n], "--rdzv-conf", f"is_host={1 - n},join_timeout=60"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *meet, *known]
        torchrun += ["--rdzv-id", "1", "--nproc-per-node", str(processes), "-m", "omniattn"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[n], *torchrun, "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            | {"GLOO_SOCKET_IFNAME": self.names[n]},
        )

    def cut(self):
        ip("-n", self.names[1], "link", "set", self.names[1], "down")


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def remove(name):
    """Ends the processes of a host, which may wait for the other one, and the host."""
    for process in ip("netns", "pids", name).split():
        os.kill(int(process), signal.SIGKILL)
    ip("netns", "del", name)


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("this machine has no ip command (iproute2)")
    found = Hosts()
    first, second = found.names
    with contextlib.ExitStack() as stack:
        try:
            for name in found.names:
                ip("netns", "add", name)
                stack.callback(remove, name)
            ip(
                "link",
                "add",
                first,
                "netns",
                first,
                "type",
                "veth",
                "peer",
                second,
                "netns",
                second,
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        for name, address in zip(found.names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield found


def text_of(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(2000)))
    return path


def test_two_hosts_train_as_one_process(hosts, tmp_path):
    out, mesh = tmp_path / "out", ["--dp", "2", "--tp", "2"]
    run = [*SMALL, *mesh, "--steps", "3", "--compare", "2"]
    run += ["--data", text_of(tmp_path), "--out", out]
    processes = [hosts.start(n, 2, *run) for n in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "held-out loss" in outputs[0] and "held-out loss" not in outputs[1]
    difference = re.search(r"largest difference in loss (\S+) over 2 steps", outputs[0])
    assert float(difference[1]) < 1e-5
    assert read_checkpoint(out / "checkpoint.safetensors")[0]


def test_a_host_that_is_cut_off_is_named(hosts, tmp_path):
    out = tmp_path / "out"
    run = [*SMALL, "--dp", "2", "--steps", "100000", "--timeout", "5", "--compare", "0"]
    run += ["--data", text_of(tmp_path), "--out", out]
    processes = [hosts.start(n, 1, *run) for n in range(2)]
    assert any("output in" in line for line in processes[0].stdout)  # before the first step
    time.sleep(3)
    hosts.cut()
    output = processes[0].communicate(timeout=100)[0]
    assert processes[0].returncode == 1
    assert re.search(r"rank 1 of 2 ended or does not answer in .*; --resume continues", output)
