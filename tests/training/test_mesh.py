"""Trainer on meshes of two and four processes (gloo) against one process, in fp64."""

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.distributed.device_mesh import init_device_mesh

from omniattn.models import PRESETS, BlocksConfig
from omniattn.modules import Attention, DecoderBlock, MoE, RMSNorm
from omniattn.training import TrainConfig, Trainer
from omniattn.training.tasks import LanguageModeling

TEXT = b"".join(b"%d squared is %d\n" % (a, a * a) for a in range(500))


class Scored(LanguageModeling):
    """With a metric of the logits."""

    def metrics(self, model, batch):
        tokens, targets = batch
        return {
            "probability": model(tokens).softmax(-1).gather(-1, targets[..., None]).mean().item()
        }


TASK = Scored(TEXT, 16)
SIZES = {"dim": 16, "num_layers": 2, "num_heads": 4}
LLAMA_SIZED = {
    name: replace(PRESETS[name], **SIZES, num_kv_heads=2, hidden_dim=24)
    for name in ("llama", "mixtral")
}
LLAMA = LLAMA_SIZED["llama"]
MIXTRAL = replace(LLAMA_SIZED["mixtral"], experts=4, top_k=2)
ODD = replace(MIXTRAL, experts=3)
MLA = {"kv_lora_rank": 8, "qk_nope_dim": 4, "qk_rope_dim": 2, "v_dim": 4}
OFTEN = {"balance_coefficient": 0.1, "z_coefficient": 0.01}
VECTORS = BlocksConfig(
    blocks=(
        DecoderBlock.Config(
            Attention.Config(16, 2),
            MoE.Config.of(16, 24, experts=4, top_k=2, router_grad="default_vector"),
            RMSNorm.Config(16),
        ),
    ),
    dim=16,
    num_layers=2,
)
#: One with losses of each sequence, and one with losses of groups of experts.
BALANCED = [
    BlocksConfig(
        blocks=(
            DecoderBlock.Config(
                Attention.Config(16, 2),
                MoE.Config.of(16, 24, experts=4, top_k=2, **OFTEN, **options),
                RMSNorm.Config(16),
            ),
        ),
        dim=16,
        num_layers=2,
    )
    for options in (
        {"balance": "deepseek_v3"},
        {"balance": "deepseek_v2_communication", "groups": 2, "top_groups": 1},
    )
]
STAGED = {
    "llama": replace(LLAMA, tie_embeddings=True),
    "mixtral": MIXTRAL,
    "resformer": BlocksConfig(
        blocks=tuple(
            DecoderBlock.Config(
                Attention.Config(16, 2, value_residual=kind),
                MoE.Config.of(16, 24, experts=4, top_k=2),
                RMSNorm.Config(16),
            )
            for kind in ("first", "later", "later", "later")
        ),
        dim=16,
        num_layers=4,
    ),
    "deepseek": replace(PRESETS["deepseek-moe-mtp"], **SIZES, **MLA, expert_dim=12),
}
CONFIG = TrainConfig(model=LLAMA, steps=4, batch=5, length=16, warmup=1, clip=0.5)
MESHES = {
    2: [{"dp": 2}, {"fsdp": 2}, {"cp": 2}, {"tp": 2}],
    4: [
        *({"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"dp": 4}),
        *({"dp": 2, "fsdp": 2}, {"fsdp": 2, "cp": 2}, {"fsdp": 2, "tp": 2}),
    ],
}
#: Meshes of models with experts, whose losses of balance are those of all tokens of a part.
EXPERTS = {
    2: [{"ep": 2}, {"fsdp": 2}, {"tp": 2}, {"cp": 2}],
    4: [
        *({"ep": 4}, {"dp": 2, "ep": 2}, {"fsdp": 2, "ep": 2}, {"ep": 2, "tp": 2}),
        *({"dp": 2, "cp": 2}, {"cp": 2, "ep": 2}, {"fsdp": 2, "tp": 2}),
    ],
}
#: Meshes of a model with a tied head, and of models with experts.
STAGES = {
    2: [("llama", {"pp": 2}), ("deepseek", {"pp": 2}), ("resformer", {"pp": 2})],
    4: [
        *(("llama", {"pp": 2, name: 2}) for name in ("dp", "fsdp", "cp", "tp")),
        *(("mixtral", {"pp": 2, name: 2}) for name in ("fsdp", "ep", "tp")),
    ],
}


def steps(trainer, count):
    for _ in range(count):
        trainer.train_step()
    return trainer.losses


def of_meshes(rank, ranks, port):
    with folder_of(rank, ranks, port) as path:
        more = {"accumulate": 2, "batch": 9, "recompute": True}
        compare(CONFIG, MESHES[ranks], path)
        compare(replace(CONFIG, **more), MESHES[ranks], path)
        refuse(ranks)
        nans(rank)


def of_experts_and_stages(rank, ranks, port):
    with folder_of(rank, ranks, port) as path:
        for model in (MIXTRAL, *BALANCED):
            compare(replace(CONFIG, model=model), EXPERTS[ranks], path)
        staged = replace(CONFIG, batch=8, accumulate=2, recompute=True)
        for name, sizes in STAGES[ranks]:
            compare(replace(staged, model=STAGED[name]), [sizes], path)
        several = {
            "llama": replace(STAGED["llama"], num_layers=4),
            "resformer": STAGED["resformer"],
        }
        for model in several.values():
            for name in ("Interleaved1F1B", "LoopedBFS"):
                how = {"pp_schedule": name, "stages_per_rank": 2}
                sizes = {"pp": 2} | ({"fsdp": 2} if ranks == 4 else {})
                compare(replace(staged, model=model), [sizes, sizes], path, **how)


@contextmanager
def folder_of(rank, ranks, port):
    """Yields the path of a checkpoint, to processes that compute in fp64."""
    start(rank, ranks, port)
    torch.set_default_dtype(torch.float64)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    yield Path(folder[0]) / "checkpoint.safetensors"
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


def compare(config, meshes, path, **how):
    """Compares runs on meshes with one; each mesh continues the run of the one before, and one
    process that of the last."""
    alone = Trainer(config, TASK)
    expected = steps(alone, 4)
    held_out = alone.evaluate()
    for n, sizes in enumerate(meshes):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        trainer = Trainer(config, TASK, mesh=mesh, **how)
        if n > 0:
            trainer.load(path)
        steps(trainer, 4 - trainer.step)
        torch.testing.assert_close(trainer.losses, expected, rtol=1e-9, atol=0, msg=f"{sizes}")
        torch.testing.assert_close(trainer.evaluate(), held_out, rtol=1e-9, atol=0)
        torch.testing.assert_close(trainer.held_out[-1], alone.held_out[-1], rtol=1e-9, atol=0)
        weights = trainer.whole_model().state_dict()
        for name, t in alone.model.state_dict().items():
            torch.testing.assert_close(weights[name], t, rtol=1e-7, atol=1e-8, msg=name)
        found, wanted = trainer.routers.history(), alone.routers.history()
        torch.testing.assert_close(found | trainer.further, wanted | alone.further)
        trainer = Trainer(config, TASK, mesh=mesh, **how)
        steps(trainer, 2)
        trainer.save(path)
        dist.barrier()
    again = Trainer(config, TASK)
    again.load(path)
    torch.testing.assert_close(steps(again, 2), expected, rtol=1e-9, atol=0)
    dist.barrier()


def refuse(ranks):
    """All ranks get the same error."""
    for names, config, message in (
        (("data",), CONFIG, "mesh must have dimensions named pp, dp, fsdp, cp, ep, tp"),
        (("pp",), replace(CONFIG, accumulate=2), f"batch=5, accumulate=2, pp={ranks}"),
        (("pp",), replace(CONFIG, model=replace(LLAMA, num_layers=3)), "got num_layers=3"),
        (("fsdp",), replace(CONFIG, batch=1), f"got batch=1, accumulate=1, fsdp={ranks}"),
        (
            ("fsdp",),
            replace(CONFIG, model=VECTORS),
            "router_grad='default_vector' is not supported",
        ),
        (("ep",), CONFIG, "model must have MoE layers, got Llama without"),
        (("ep",), replace(CONFIG, model=ODD, batch=ranks), f"experts=3, ranks={ranks}"),
        (("tp",), replace(CONFIG, model=replace(LLAMA, num_heads=1, num_kv_heads=1)), "num_heads"),
        (("dp",), replace(CONFIG, model="bert"), "mesh must be None except for decoders, got Bert"),
        (("cp",), replace(CONFIG, length=31), "length must be a multiple of twice .* length=31"),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=names)
        with pytest.raises((NotImplementedError, ValueError), match=message):
            Trainer(config, TASK, mesh=mesh)
    staged = replace(CONFIG, batch=12, accumulate=3)
    for names, how, message in (
        (("dp",), {"pp_schedule": "1F1B"}, "without pp, got pp_schedule='1F1B', stages_per_rank=1"),
        (("pp",), {"pp_schedule": "2F2B"}, "pp_schedule must be one of .*, got pp_schedule='2F2B'"),
        (
            ("pp",),
            {"stages_per_rank": 0},
            "stages_per_rank must be an int >= 1, got stages_per_ran",
        ),
        (("pp",), {"stages_per_rank": 3}, f"num_layers=2, ranks={ranks}, stages_per_rank=3"),
        (
            ("pp",),
            {"pp_schedule": "GPipe", "stages_per_rank": 2},
            "got pp_schedule='GPipe', stages_per_rank=2",
        ),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=names)
        with pytest.raises(ValueError, match=message):
            Trainer(staged, TASK, mesh=mesh, **how)
    five = replace(CONFIG, batch=5 * ranks, accumulate=2 * ranks + 1)
    with pytest.raises(ValueError, match=f"got accumulate={2 * ranks + 1}, pp={ranks}"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
        Trainer(five, TASK, mesh=mesh, stages_per_rank=2)


def nans(rank):
    """A loss that is no number on one rank ends the step on all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    trainer = Trainer(CONFIG, TASK, mesh=mesh)
    if rank == 1:
        trainer.model.register_forward_hook(lambda *given: given[-1] * torch.nan)
    with pytest.raises(FloatingPointError, match=r"the loss of step 0 is nan on rank 1$"):
        trainer.train_step()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", ["of_meshes", "of_experts_and_stages"])
def test_a_run_on_a_mesh_is_that_of_one_process(work, ranks):
    run(__file__, work, ranks)


if __name__ == "__main__":
    main({"of_meshes": of_meshes, "of_experts_and_stages": of_experts_and_stages})
