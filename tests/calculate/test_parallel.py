"""calculate.parallel against what ranks of a Trainer store and send (gloo), message by message."""

import gc
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniattn.calculate import parallel
from omniattn.models import PRESETS, BlocksConfig
from omniattn.modules import (
    Attention,
    DecoderBlock,
    GatedDeltaNet,
    GatedMLP,
    Mamba2,
    MoBA,
    RMSNorm,
)
from omniattn.training import TrainConfig, Trainer
from omniattn.training.ranks import DIMENSIONS
from omniattn.training.tasks import LanguageModeling

TASK = LanguageModeling(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(500)), 16)
SIZES = {"dim": 16, "num_layers": 2, "vocab_size": 256}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
MAMBA2 = Mamba2.Config(16, d_state=5, headdim=4, ngroups=4)
DELTA = GatedDeltaNet.Config(16, 4, conv_size=3)


def blocks_of(*mixers):
    norms = GatedMLP.Config(16, 24), RMSNorm.Config(16)
    return BlocksConfig(blocks=tuple(DecoderBlock.Config(m, *norms) for m in mixers), **SIZES)


MODELS = {
    "llama": replace(PRESETS["llama"], **SIZES, **HEADS),
    "tied": replace(PRESETS["llama"], **SIZES, **HEADS, tie_embeddings=True),
    "mixtral": replace(PRESETS["mixtral"], **SIZES, **HEADS, experts=4, top_k=2),
    "mamba2": blocks_of(MAMBA2),
    "hybrid": blocks_of(DELTA, Attention.Config(16, 4)),
    "moba": blocks_of(MoBA.Config(16, 4, block_size=4)),
}
MESHES = {
    2: [(name,) for name in DIMENSIONS],
    4: [*itertools.combinations(DIMENSIONS, 2)],
}
BATCH, PARTS = 16, 2


#: Number of tokens, assignments and probabilities of each of four experts.
LOADS = 1 + 2 * 4


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends, by kind; groups have two ranks where sizes do not
    tell. Single numbers, of losses and norms, and sums for balance losses are left out."""

    def __init__(self, experts, exchange):
        super().__init__()
        self.bytes, self.experts, self.exchange = Counter(), experts, exchange

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace not in ("c10d", "_c10d_functional"):
            return out
        first = tree_leaves(args)[0]
        if first.numel() > 1:
            size = first.nbytes
            if name == "_allgather_base_":
                self.bytes["shard"] += size - args[1].nbytes
            elif name == "_reduce_scatter_base_":
                self.bytes["shard"] += args[1].nbytes - size
            elif name == "allreduce_":
                if first.numel() > LOADS:
                    self.bytes["replicate"] += size
            elif name == "send":
                self.bytes["sent"] += size
            elif name == "alltoall_base_":
                self.bytes[self.exchange] += args[1].nbytes / 2
            elif name == "allgather_" and not self.experts:  # with experts: their records
                self.bytes["sent"] += size
            elif name in ("all_reduce", "all_gather_into_tensor"):
                self.bytes["tp"] += size
            elif name == "reduce_scatter_tensor":
                self.bytes["tp"] += size / 2
            else:
                assert name in ("recv_", "wait_tensor", "_wrap_tensor_autograd", "allgather_"), name
        return out


def of_meshes(rank, ranks, port):
    start(rank, ranks, port)
    torch.set_default_dtype(torch.float64)
    for names in MESHES[ranks]:
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        for name, model in MODELS.items():
            if name == "moba" or ("ep" in names and name != "mixtral"):
                continue
            config = TrainConfig(model=model, batch=BATCH, length=16, accumulate=PARTS)
            compare(f"{name} {names}", Trainer(config, TASK, mesh=mesh), dict.fromkeys(names, 2))
    dist.destroy_process_group()


def compare(where, trainer, sizes):
    trainer.train_step()
    experts = "mixtral" in where
    exchange = next((n for n in ("ep", "tp") if n in sizes), "ep") if experts else "sent"
    with Sent(experts, exchange) as sent:
        trainer.train_step()
    model = trainer.config.model_config
    options = {"batch": BATCH, "length": 16, "accumulate": PARTS, "dtype": "fp64"}
    found = parallel(model, sizes, **options)
    stored = Counter()
    for p in trainer.model.parameters():
        own = [p, p.grad, *(t for t in trainer.optimizer.state[p].values() if t.dim())]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in own]
        stored["parameters"] += local[0].numel()
        stored["state_bytes"] += sum(t.nbytes for t in local)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (stored, sent.bytes))
    for name in ("parameters", "state_bytes"):
        assert max(one[name] for one, _ in every) == getattr(found, name), where
    expected = Counter(found.traffic)
    expected["sent"] = expected.pop("cp", 0) + expected.pop("pp", 0)
    for kind in {*expected, *(k for _, one in every for k in one)}:
        counts = [one[kind] for _, one in every]
        # Ranks send as many rows to experts as these get from them, on average.
        counted = sum(counts) / len(counts) if kind == "ep" else max(counts)
        assert counted == expected[kind], (where, kind, counts, expected[kind])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_store_and_send_what_is_calculated(ranks):
    run(__file__, "of_meshes", ranks, timeout=300)


#: Models in fp32 whose activations are some ten MiB, by name the meshes of two ranks.
LARGER = {"dim": 128, "num_layers": 4, "vocab_size": 256, "hidden_dim": 384}
MEMORY = {"llama": ("pp", "fsdp", "tp"), "mixtral": ("dp",)}


def resident(key):
    """Bytes of this process's memory, VmRSS, or VmHWM, the most since `clear_refs`."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(key))
    return int(line.split()[1]) * 1024


def of_memory(rank, ranks, port):
    """Memory at the start of a step, of tensors, and its growth until the peak, of the process."""
    start(rank, ranks, port)
    task = LanguageModeling(b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(999)), 256)
    for name, meshes in MEMORY.items():
        model = replace(MODELS[name], **LARGER)
        for dimension in meshes:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(dimension,))
            config = TrainConfig(model=model, batch=16, length=256, accumulate=PARTS)
            trainer = Trainer(config, task, mesh=mesh)
            trainer.train_step()
            held = [t for p in trainer.model.parameters() for t in (p, p.grad)]
            held += [t for s in trainer.optimizer.state.values() for t in s.values() if t.dim()]
            stored = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held)
            before = resident("VmRSS")
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
            trainer.train_step()
            every = [None] * ranks
            dist.all_gather_object(every, stored + resident("VmHWM") - before)
            options = {"batch": 16, "length": 256, "accumulate": PARTS, "dtype": "fp32"}
            found = parallel(model, {dimension: ranks}, **options)
            ratio = found.peak_bytes / max(every)
            assert 0.9 < ratio < 1.1, (name, dimension, ratio, every)
            del trainer, held
            gc.collect()
    dist.destroy_process_group()


def test_peak_memory_is_within_a_tenth_of_that_of_ranks(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "32768")  # tensors are given back when freed
    run(__file__, "of_memory", 2)


def test_more_ranks_than_there_are_here():
    """Sizes of Llama 3 70B on 2,048 GPUs, from the formulas of the docstring."""
    mesh = {"dp": 4, "fsdp": 64, "tp": 8}
    found = parallel(
        "llama-3-70b", mesh, batch=512, length=8192, peak_flops=1e15, link=5e10, accumulate=2
    )
    total = 70_553_706_496
    assert found.ranks == 2048 and found.parameters == pytest.approx(total / 512, rel=1e-3)
    row = 8192 * 8192 * 2  # one sequence of a microbatch, in bf16
    tp = 2 * (7 / 8 * 2 * row * (2 * 160 + 2))
    assert found.traffic["tp"] == pytest.approx(tp, rel=1e-3)
    shard = 63 / 64 * total / 8 * 2
    assert found.traffic["shard"] == pytest.approx((2 * 2 + 2) * shard, rel=0.02)
    assert found.traffic["replicate"] == pytest.approx(2 * 3 / 4 * total / 512 * 2 * 2, rel=1e-3)
    compute = 6 * total * 512 * 8192 / 2048 / 1e15
    assert compute < found.seconds["compute"] < 1.2 * compute
    assert found.seconds["tp"] == found.traffic["tp"] / 5e10


@pytest.mark.parametrize(
    ("mesh", "options", "error", "message"),
    [
        ({"data": 2}, {}, ValueError, "mesh must have dimensions of pp, .* got data"),
        ({"dp": 3}, {}, ValueError, "batch must be a multiple of 3, got batch=16"),
        ({"dp": 0}, {}, ValueError, "got dp=0"),
        ({"cp": 2}, {"length": 18}, ValueError, "length must be a multiple of 4, got length=18"),
        ({"pp": 4}, {}, ValueError, "num_layers must be a multiple of 4, got num_layers=2"),
        ({"ep": 2}, {}, ValueError, "ep must be 1 without experts, got ep=2"),
        ({"tp": 3}, {}, ValueError, "tp must divide vocab_size, got tp=3, vocab_size=256"),
        ({"tp": 8}, {}, ValueError, "num_heads=4"),
        ({"cp": 2}, {"config": "moba"}, NotImplementedError, "must be of .*Attention, .* got MoBA"),
        ({"dp": 2}, {"config": PRESETS["bert"]}, NotImplementedError, "of a decoder, got BertC"),
    ],
)
def test_meshes_that_do_not_divide_are_refused(mesh, options, error, message):
    given = {"batch": 16, "length": 16, "config": "llama"} | options
    config = given.pop("config")
    with pytest.raises(error, match=message):
        parallel(MODELS.get(config, config) if isinstance(config, str) else config, mesh, **given)


if __name__ == "__main__":
    main({"of_meshes": of_meshes, "of_memory": of_memory})
