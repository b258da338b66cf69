"""pipeline_parallel on two and four processes (gloo) against one process, in fp64."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from omniattn.distributed import pipeline_parallel
from omniattn.distributed.pipeline import same_stages
from omniattn.models import PRESETS, BlocksConfig, Routers
from omniattn.modules import (
    Attention,
    AttentionResiduals,
    DecoderBlock,
    Engram,
    GatedMLP,
    HyperConnections,
    Mamba2,
    RMSNorm,
    RWKV7TimeMix,
)

EXACT = {"rtol": 1e-11, "atol": 1e-12}
T, PARTS = 12, 4
SIZES = {"dim": 16, "num_layers": 4, "vocab_size": 40}
HEADS = {"num_heads": 2, "hidden_dim": 24}
MLA = {"kv_lora_rank": 8, "qk_nope_dim": 4, "qk_rope_dim": 2, "v_dim": 4}
MOE = {"experts": 4, "top_k": 2, "expert_dim": 12}
#: Mixers whose layers read values, or keys and values, of earlier ones: (name, kind, options of
#: each layer).
SHARING = (
    ("rwkv7", RWKV7TimeMix, [{"head_dim": 4, "layer_idx": n, "num_layers": 4} for n in range(4)]),
    (
        "value_residual",
        Attention,
        [{"num_heads": 2, "value_residual": "later" if n else "first"} for n in range(4)],
    ),
    (
        "shared_kv",
        Attention,
        [{"num_heads": 2, "shared_kv": kind} for kind in ("source", "reader", "source", "reader")],
    ),
    (
        "yoco",
        Attention,
        [{"num_heads": 2, "shared_kv": kind} for kind in (None, "source", "reader", "reader")],
    ),
)
ENGRAM = Engram.Config(16, 40, (64, 64), ngram_dim=8, num_heads=2)


def models():
    """Configs by name: tied and untied heads, learned positions, recurrences, a hybrid, experts
    with multi-token prediction, residual streams, values and keys of earlier layers,
    recomputation."""

    def preset(name, **sizes):
        return replace(PRESETS[name], **SIZES | sizes)

    yield "llama", preset("llama", **HEADS, gradient_checkpointing=True)
    yield "gemma2", preset("gemma-2-2b", **HEADS, num_kv_heads=2, head_dim=4)
    yield "gpt2", preset("gpt2", num_heads=2)
    linear = {"linear_heads": 2, "linear_head_dim": 4, "schedule": ("linear", "full")}
    yield "kimi", preset("kimi-linear", **HEADS, **MLA, **MOE, **linear)
    yield "deepseek", preset("deepseek-moe-mtp", **HEADS, **MLA, **MOE)
    mixer = Mamba2.Config(16, d_state=5, headdim=4, ngroups=4)
    block = DecoderBlock.Config(mixer, None, RMSNorm.Config(16))
    yield "mamba2", BlocksConfig(blocks=(block,), **SIZES)
    for kind in (HyperConnections, AttentionResiduals):
        streams = replace(block, streams=kind.Config(16))
        yield kind.__name__, BlocksConfig(blocks=(streams,), **SIZES)
    ngrams = {"engram": ENGRAM, "engram_layers": (1, 3)}
    yield "engram", BlocksConfig(blocks=(block,), **SIZES, **ngrams)
    for name, kind, options in SHARING:
        mixers = (kind.Config(16, **given) for given in options)
        layers = (replace(block, mixer=mixer, mlp=GatedMLP.Config(16, 24)) for mixer in mixers)
        yield name, BlocksConfig(blocks=tuple(layers), **SIZES, tie_embeddings=True)


def reference(model, tokens, weights):
    """Returns the losses of parts times their weights, and adds their gradients."""
    losses = []
    for part, weight in zip(tokens.chunk(PARTS), weights, strict=True):
        loss = model(part[:, :-1], part[:, 1:])
        total = loss + model.auxiliary_loss() + Routers(model).loss()
        (weight * total).backward()
        losses.append(weight * loss.detach())
    return torch.stack(losses)


def step(model, schedule, tokens, **options):
    """Runs a step with the arguments of this rank, and returns the result of the last one."""
    first = (tokens[:, :-1],) if model.is_first else ()
    return schedule.step(*first, tokens=tokens[:, :-1], **options)


def of_models(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    for name, config in models():
        torch.manual_seed(0)
        whole = replace(config, num_layers=2 * ranks).build(dtype=torch.float64)
        for p in whole.parameters():
            torch.nn.init.normal_(p, std=0.3)
        tokens = torch.randint(40, (2 * PARTS, T + 1))
        for kind, weights, each in (
            (ScheduleGPipe, [0.4, 0.3, 0.2, 0.1], None),
            (Schedule1F1B, None, None),
            (ScheduleInterleaved1F1B, [0.4, 0.3, 0.2, 0.1], 2),
        ):
            whole.zero_grad()
            expected = reference(whole, tokens, weights or [1 / PARTS] * PARTS)
            model = copy.deepcopy(whole)
            model.zero_grad()
            stages = pipeline_parallel(model, mesh, stages_per_rank=each)
            assert isinstance(model, type(whole)) and (each or stages.submod is model)
            schedule = kind(stages, PARTS, loss_fn=lambda x, y: x, scale_grads=weights is None)
            targets, losses = tokens[:, 1:], []
            options = {"targets": targets, "target": targets, "losses": losses}
            if weights is not None:
                options["share"] = torch.tensor(weights, dtype=torch.float64)
            step(model, schedule, tokens, **options)
            if model.is_last:
                found = torch.cat(losses).detach() / (1 if weights else PARTS)
                same(found, expected, name)
            same_gradients(model, whole, name)
        whole.eval(), model.eval()
        with torch.no_grad():
            out = step(model, ScheduleLoopedBFS(same_stages(stages), 1), tokens)
            if model.is_last:
                same(out, whole(tokens[:, :-1]), name)
    refuse(mesh)
    dist.destroy_process_group()


def same(found, expected, where):
    torch.testing.assert_close(found, expected, **EXACT, msg=lambda m: f"{where}: {m}")


def same_gradients(stage, whole, where):
    """All stages together have the parameters of the model, and the same gradients."""
    expected = dict(whole.named_parameters())
    for name, p in stage.named_parameters():
        same(p.grad, expected[name].grad, f"{where} {name}")
    repeated = {id(p) for p in stage.repeated}
    own = [name for name, p in stage.named_parameters() if id(p) not in repeated]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    assert sorted(name for names in found for name in names) == sorted(expected)


def refuse(mesh):
    """All ranks get the same error, and the model stays as it was."""
    llama = replace(PRESETS["llama"], **SIZES, **HEADS)
    two = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "pp"))
    for config, given, error, message in (
        (llama, None, TypeError, "mesh must be a DeviceMesh, got mesh=None"),
        (llama, two, ValueError, "mesh must have one dimension, as mesh"),
        (replace(llama, num_layers=5), mesh, ValueError, "divide the layers, got num_layers=5"),
        (PRESETS["bert"], mesh, TypeError, "be a Decoder, got Bert"),
        (PRESETS["zamba2"], mesh, NotImplementedError, "layers of a decoder must be DecoderBlocks"),
    ):
        model = config.build(device="meta")
        before = list(model.state_dict())
        with pytest.raises(error, match=f"pipeline_parallel: .*{message}"):
            pipeline_parallel(model, given)
        assert list(model.state_dict()) == before
    for count, error, message in (
        (0, ValueError, "stages_per_rank must be an int >= 1, got stages_per_rank=0"),
        (5, ValueError, "divide the layers, got num_layers=4, ranks=., stages_per_rank=5"),
    ):
        with pytest.raises(error, match=message):
            pipeline_parallel(llama.build(device="meta"), mesh, stages_per_rank=count)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_compute_as_one_process(ranks):
    run(__file__, "of_models", ranks)


if __name__ == "__main__":
    main({"of_models": of_models})
