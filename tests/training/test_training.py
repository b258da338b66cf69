"""Training: schedule, parameter groups, data, exact resumption."""

import math

import pytest
import torch

from omniattn.models import PRESETS, CheckpointError, Llama, load_model
from omniattn.models.checkpoint import read_checkpoint, write_checkpoint
from omniattn.training import (
    LanguageModeling,
    TrainConfig,
    Trainer,
    WarmupCosine,
    learning_rate,
    parameter_groups,
    warmup_cosine,
)
from omniattn.training.data import read_documents, standard_library

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(40) for b in range(20))
_T5_TABLE = "relative_attention_bias.weight"
_SWIN_TABLE = "relative_position_bias_table"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
TINY = TrainConfig(model="llama-tiny", steps=6, batch=2, length=33, warmup=2)


def trainer(text: bytes = TEXT, config: TrainConfig = TINY) -> Trainer:
    return Trainer(config, LanguageModeling(text, config.length))


def state(run: Trainer) -> list[torch.Tensor]:
    moments = [run.optimizer.state[p][key] for p in run.model.parameters() for key in MOMENTS]
    return [*run.model.state_dict().values(), *moments, torch.get_rng_state()]


def test_schedule_warms_up_falls_as_a_cosine_and_stays():
    config = TrainConfig(steps=110, warmup=10, lr=1.0, min_lr=0.1)
    assert [learning_rate(s, config) for s in (0, 5, 10)] == [0, 0.5, 1]
    assert math.isclose(learning_rate(60, config), 0.55)
    assert math.isclose(learning_rate(110, config), 0.1)
    assert math.isclose(learning_rate(500, config), 0.1)


def test_the_schedule_of_an_optimizer_is_that_of_the_trainer():
    config = TrainConfig(steps=30, warmup=7, lr=0.02, min_lr=0.003)
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}]
    span = {"warmup": 7, "steps": 30, "min_lr": 0.003}

    def begin():
        optimizer = torch.optim.AdamW(groups, lr=config.lr)
        return optimizer, WarmupCosine(optimizer, **span)

    optimizer, schedule = begin()
    for step in range(35):
        if step == 12:  # as a run that is interrupted
            saved = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = begin()
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        assert optimizer.param_groups[0]["lr"] == learning_rate(step, config)
        assert optimizer.param_groups[1]["lr"] == warmup_cosine(step, lr=0.5, **span)
        optimizer.step()
        schedule.step()


def test_weight_decay_leaves_out_norms_and_embeddings():
    model = Llama(PRESETS["llama-tiny"])
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = (
        {names[id(p)] for p in g["params"]} for g in parameter_groups(model, weight_decay=0.1)
    )
    assert decayed | others == set(names.values())
    assert all(n.endswith("norm.weight") or n == "embed_tokens.weight" for n in others)
    assert "lm_head.weight" in decayed


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("gpt2", {"embed_tokens.weight", "embed_positions.weight"}),
        ("t5", {"embed_tokens.weight"} | {f"{x}coder.{_T5_TABLE}" for x in ("en", "de")}),
        ("swin", {f"stages.{i}.{i + j}.attn.{_SWIN_TABLE}" for i in (0, 1) for j in (0, 1)}),
    ],
)
def test_weight_decay_leaves_out_tables_of_positions(name, tables):
    model = PRESETS[name].build(device="meta")
    names = {id(p): n for n, p in model.named_parameters()}
    others = parameter_groups(model, weight_decay=0.1)[1]["params"]
    assert {names[id(p)] for p in others if p.dim() > 1} == tables


def test_batches_depend_on_seed_and_step_and_stay_in_the_training_split():
    task = LanguageModeling(bytes(range(256)) * 8, 33)
    data = task.data
    tokens, targets = task.batch(5, 0, 3)
    assert tokens.shape == targets.shape == (5, 33)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, task.batch(5, 0, 3)[0])
    assert not torch.equal(tokens, task.batch(5, 0, 4)[0])
    assert not torch.equal(tokens, task.batch(5, 1, 3)[0])
    assert len(data.train) + len(data.held_out) == 2048
    held_out, _ = task.held_out_batch(10**6)
    assert len(held_out) == len(data.held_out) // 34


def test_the_standard_library_is_found():
    assert any(f.name == "argparse.py" for f in standard_library())
    assert len(read_documents(None)) > 10**6


def test_a_folder_gives_its_text_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes(b"xx")
    (tmp_path / "y.txt").write_bytes(b"yy")
    (tmp_path / "binary").write_bytes(b"\0\1")
    assert sorted(read_documents(tmp_path).split(b"\n")) == [b"xx", b"yy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_learns(dtype):
    run = trainer(config=TrainConfig("llama-tiny", 30, 4, 33, dtype, warmup=5, lr=1e-2))
    before = run.evaluate()
    for _ in range(30):
        run.train_step()
    assert run.evaluate() < before - 1


def test_resuming_changes_no_bit(tmp_path):
    straight = trainer()
    for _ in range(6):
        straight.train_step()
    expected = state(straight)

    first = trainer()
    for _ in range(3):
        first.train_step()
    first.evaluate()
    first.save(tmp_path / "c")
    torch.manual_seed(99)
    second = trainer()
    second.load(tmp_path / "c")
    assert second.held_out == first.held_out
    for _ in range(3):
        second.train_step()
    assert second.losses == straight.losses
    assert all(torch.equal(a, b) for a, b in zip(state(second), expected, strict=True))


def test_a_run_saved_when_every_mixer_was_an_attention_resumes(tmp_path):
    run = trainer()
    run.train_step()
    run.save(tmp_path / "c")
    tensors, metadata = read_checkpoint(tmp_path / "c")
    former = {name.replace("mixer.", "self_attn."): t for name, t in tensors.items()}
    assert "optimizer/step/layers.0.self_attn.q_proj.weight" in former
    write_checkpoint(tmp_path / "former", former, metadata)
    second = trainer()
    second.load(tmp_path / "former")
    assert all(torch.equal(a, b) for a, b in zip(state(second), state(run), strict=True))


def test_a_checkpoint_is_a_model_file(tmp_path):
    run = trainer()
    run.train_step()
    run.save(tmp_path / "c")
    loaded = load_model(tmp_path / "c")
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(loaded(tokens), run.model(tokens))


def test_load_rejects_other_text_and_files_without_a_run(tmp_path):
    run = trainer()
    run.train_step()
    run.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="other data"):
        trainer(TEXT + b"!").load(tmp_path / "c")
    write_checkpoint(tmp_path / "w", {"x": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="no training state"):
        run.load(tmp_path / "w")


def test_options_of_a_run_are_checked_when_it_is_made():
    """Without it, the first step or AdamW fails, by names that the user did not give."""
    for name, value, error in (
        ("steps", -1, "steps must be an int >= 0, got steps=-1"),
        ("batch", 0, "batch must be an integer >= 1, got batch=0"),
        ("length", 2.5, "length must be an int"),
        ("dtype", "bfloat", "dtype must be one of .* got dtype='bfloat'; did you mean 'bfloat16'"),
        ("dtype", torch.bfloat16, "dtype must be str, got dtype=torch.bfloat16"),
        ("lr", "1e-3", "lr must be float, got lr='1e-3'"),
        ("lr", math.nan, "lr must be finite, got lr=nan"),
        ("weight_decay", -0.1, "weight_decay must be .* got weight_decay=-0.1"),
        ("clip", -1.0, "clip must be a number >= 0, got clip=-1.0"),
        ("decay_steps", "all", "decay_steps must be int | None, got decay_steps='all'"),
        ("data", TEXT, "data must be str | None, got data="),
    ):
        with pytest.raises((TypeError, ValueError), match=f"TrainConfig: {error}"):
            TrainConfig(**{name: value})
    assert TrainConfig(clip=math.inf, seed=-3, model=PRESETS["gpt2"]).clip == math.inf
    with pytest.raises(TypeError, match="Trainer: config must be a TrainConfig, got config=Llama"):
        Trainer(PRESETS["llama-tiny"], LanguageModeling(TEXT, 33))


def test_a_loss_that_is_not_finite_stops_before_the_weights_change():
    run = trainer()
    run.train_step()
    with torch.no_grad():
        run.model.lm_head.weight[0, 0] = float("nan")
    before = run.model.norm.weight.clone()
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        run.train_step()
    assert torch.equal(run.model.norm.weight, before)
