"""Runs on two processes of which one fails, hangs, or has another configuration."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import main, run, shared_store, start
from torch.distributed.device_mesh import init_device_mesh

from omniattn.cli.errors import CommandError
from omniattn.cli.processes import on_mesh
from omniattn.models import PRESETS
from omniattn.training import RankError, TrainConfig, Trainer
from omniattn.training.peers import Peers
from omniattn.training.ranks import DIMENSIONS
from omniattn.training.tasks import LanguageModeling

TASK = LanguageModeling(b"some text " * 200, 16)
LLAMA = replace(PRESETS["llama"], dim=16, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=24)
CONFIG = TrainConfig(model=LLAMA, steps=4, batch=4, length=16)


def trainer_of(rank, ranks, port, config=CONFIG, names=("dp",)):
    start(rank, ranks, port, timedelta(seconds=3))
    Peers.grace = 1.0
    return Trainer(config, TASK, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=names))


def fails(rank, ranks, port):
    """The other rank names the error of one in its second step."""
    trainer = trainer_of(rank, ranks, port)
    trainer.train_step()
    if rank == 1:
        trainer.task = None
        with pytest.raises(AttributeError):
            trainer.train_step()
        os._exit(0)
    message = r"^rank 1 of 2 failed in step 1: AttributeError: 'NoneType' object has no .* 'parts'$"
    with pytest.raises(RankError, match=message):
        trainer.train_step()


def ends(rank, ranks, port):
    """The other rank names one that ended without an error."""
    trainer = trainer_of(rank, ranks, port, names=("tp",))
    trainer.train_step()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended or does not answer in step 1$"):
        trainer.train_step()


def hangs(rank, ranks, port):
    """The other rank names one that sleeps, after the timeout of the process group."""
    trainer = trainer_of(rank, ranks, port, names=("pp",))
    trainer.train_step()
    if rank == 1:
        time.sleep(60)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended or does not answer in step 1$"):
        trainer.train_step()
    assert time.monotonic() - began < 10
    os._exit(3)  # the test ends the other one


def differs(rank, ranks, port):
    """All ranks get the same error of a configuration that one has not."""
    trainer_of(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    wider = replace(LLAMA, dim=32)
    other = LanguageModeling(b"other text " * 200, 16)
    for config, task, message in (
        (replace(CONFIG, seed=rank), TASK, "config.seed must .*, got 0 on rank 0, 1 on rank 1"),
        (replace(CONFIG, model=(LLAMA, wider)[rank]), TASK, "model.dim must .*, got 16 .*, 32 on"),
        (CONFIG, (TASK, other)[rank], "data must be the same on all ranks, got '"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(config, task, mesh=mesh)


def watched(rank, ranks, port):
    """In a command, a rank that sleeps ends, too, and says where."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    Peers.grace = 1.0
    sizes = dict.fromkeys(DIMENSIONS, 1) | {"dp": ranks}
    args = argparse.Namespace(**sizes, device="cpu", timeout=3)
    message = "rank 1 of 2 ended or does not answer in the run; --resume continues"
    with pytest.raises(CommandError, match=message), on_mesh(args):
        if rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("work", ["fails", "ends", "differs"])
def test_all_ranks_name_the_rank(work):
    run(__file__, work, 2)


@pytest.mark.parametrize("work", ["hangs", "watched"])
def test_a_rank_that_hangs_is_named(work):
    with shared_store() as (port, env):
        first, second = (
            subprocess.Popen(
                [sys.executable, __file__, work, str(rank), "2", port],
                env=env,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        )
        error = first.communicate(timeout=60)[1]
        if work == "hangs":
            assert first.returncode == 3, error
            second.kill()
        else:
            assert first.returncode == 0, error
        error = second.communicate(timeout=20)[1]
    if work == "watched":
        assert second.returncode == 1
        assert (
            "train: rank 1 of 2 ended or does not answer in the run; rank 1 was in watched" in error
        )


if __name__ == "__main__":
    names = ("fails", "ends", "hangs", "differs", "watched")
    main({name: globals()[name] for name in names})
