"""Losses and gradients of every mesh against one process, in fp64: a table of docs/distributed.md.

`python tests/distributed/test_exactness.py` writes the table anew, with two and four processes.
"""

import itertools
import json
import math
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.distributed.device_mesh import init_device_mesh

from omniattn.models import PRESETS, BlocksConfig
from omniattn.modules import Attention, DecoderBlock, GatedDeltaNet, GatedMLP, Mamba2, MoE, RMSNorm
from omniattn.training import TrainConfig, Trainer
from omniattn.training.ranks import DIMENSIONS, whole
from omniattn.training.tasks import LanguageModeling

PAGE = Path(__file__).parents[2] / "docs/distributed.md"
TASK = LanguageModeling(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(500)), 16)
#: Greatest differences allowed: of the loss, relative to it; of the gradient of a parameter,
#: relative to its largest element.
BUDGET = (1e-14, 1e-11)
#: Meshes with two ranks in each dimension, by the number of processes.
MESHES = {
    2: [(name,) for name in DIMENSIONS],
    4: list(itertools.combinations(DIMENSIONS, 2)),
}
SIZES = {"dim": 16, "num_layers": 2, "vocab_size": 256}
NORM, MLP = RMSNorm.Config(16), GatedMLP.Config(16, 24)


def blocks(*mixers, mlp=MLP):
    return BlocksConfig(blocks=tuple(DecoderBlock.Config(m, mlp, NORM) for m in mixers), **SIZES)


def models():
    """Returns the models by name."""
    mlp = MoE.Config.mixtral(16, 24, experts=4, top_k=2, balance_coefficient=0.02)
    return {
        "dense": replace(PRESETS["llama"], **SIZES, num_heads=4, num_kv_heads=2, hidden_dim=24),
        "experts": blocks(Attention.Config(16, 4, 2), mlp=mlp),
        "hybrid": blocks(GatedDeltaNet.Config(16, 2), Attention.Config(16, 4, 2)),
        "recurrent": blocks(Mamba2.Config(16, d_state=5, headdim=4, ngroups=4), mlp=None),
    }


def step(config, mesh=None):
    """Returns the loss and the gradients of a first step, and the trainer's ranks."""
    trainer = Trainer(config, TASK, mesh=mesh)
    loss = trainer.train_step()
    found = {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    return loss, trainer.ranks.of_stages(found)


def differences(config, names):
    """Returns the greatest differences of loss and gradients, None for a mesh that is refused."""
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    try:
        loss, found = step(config, mesh)
    except ValueError as error:
        assert "ep" in names and "model must have MoE layers" in str(error)
        return None
    expected, wanted = step(config)
    assert found.keys() == wanted.keys()
    worst = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items())
    again, repeated = step(config, mesh)
    assert again == loss and all(map(torch.equal, repeated.values(), found.values()))
    return abs(loss / expected - 1), worst


def of_meshes(rank, ranks, port):
    """Writes the differences of all models and meshes into the file that RESULT names."""
    start(rank, ranks, port)
    torch.set_default_dtype(torch.float64)
    options = {"batch": 8, "length": 16, "accumulate": 2, "clip": math.inf}
    found = {}
    for names in MESHES[ranks]:
        for kind, model in models().items():
            config = TrainConfig(model=model, **options)
            found[f"{kind} {'+'.join(names)}"] = differences(config, names)
    if rank == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


def measured(ranks):
    with tempfile.TemporaryFile("w+") as out:
        run(__file__, "of_meshes", ranks, stdout=out, timeout=300)
        out.seek(0)
        return json.load(out)


def table(found):
    """Formats the differences: a row for each mesh, a column for each model."""
    kinds = list(models())
    lines = [f"| mesh | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for names in (*MESHES[2], *MESHES[4]):
        cells = [found[f"{kind} {'+'.join(names)}"] for kind in kinds]
        shown = [
            "-" if c is None else ", ".join(f"{x:.0e}" if x else "0" for x in c) for c in cells
        ]
        lines.append(f"| {', '.join(f'{name} 2' for name in names)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def marked(page):
    """Splits the page at its table."""
    return re.fullmatch(r"(.*<!-- exactness -->\n)(.*?)(\n<!-- end -->.*)", page, re.S).groups()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mesh_computes_as_one_process(ranks):
    """A mesh has the losses and gradients of one process, the same bits each time, or is refused
    where the table says so."""
    rows = marked(PAGE.read_text())[1].splitlines()
    kinds = list(models())
    assert len(rows) == 2 + len(MESHES[2]) + len(MESHES[4])
    for key, found in measured(ranks).items():
        kind, names = key.split()
        label = ", ".join(f"{name} 2" for name in names.split("+"))
        (row,) = [row for row in rows if row.startswith(f"| {label} |")]
        cell = row.split(" | ")[1 + kinds.index(kind)].rstrip(" |")
        assert (found is None) == (cell == "-"), key
        for value in (found, [float(n) for n in cell.split(", ")]) if found else ():
            assert value[0] <= BUDGET[0] and value[1] <= BUDGET[1], (key, value)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main({"of_meshes": of_meshes})
    before, _, after = marked(PAGE.read_text())
    PAGE.write_text(before + table(measured(2) | measured(4)) + after)
