"""OmniattnCallback patches the model of a Trainer, which then trains along the same curve."""

import inspect

import pytest
import torch
import transformers as hf
from patched_models import SIZES

from omniattn.hf import OmniattnCallback, patch
from omniattn.hf.patching.callback import PatchOptions
from omniattn.hf.patching.patch import is_patched


def make() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def train(folder, callbacks, by_init: bool = False, **options) -> tuple[hf.Trainer, list[float]]:
    """Losses of a few steps, each of two batches, and that of the evaluation."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 97, (9,), generator=generator) for _ in range(12)]
    data = [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(9) < n % 7, -100)}
        for n, row in enumerate(rows)
    ]
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    model = {"model_init": make} if by_init else {"model": make()}
    trainer = hf.Trainer(
        **model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer, [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("by_init", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}])
def test_a_trainer_trains_the_same(options, by_init, tmp_path):
    _, expected = train(tmp_path, [], by_init, **options)
    trainer, losses = train(tmp_path, [OmniattnCallback()], by_init, **options)
    assert is_patched(trainer.model)
    predicted = trainer.predict(trainer.eval_dataset).predictions
    assert predicted.shape == (4, 9, SIZES["vocab_size"])
    rtol = 1e-2 if "bf16" in options else 1e-4
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)


def test_options_are_those_of_patch_and_a_patched_model_stays(tmp_path):
    parameters = list(inspect.signature(patch).parameters)
    assert list(PatchOptions.__annotations__) == parameters[1:]
    with pytest.raises(
        TypeError, match=r"options must be of attention, linear, .* got norms=False"
    ):
        OmniattnCallback(norms=False)
    with pytest.raises(TypeError, match="OmniattnCallback: norm must be True or False, got norm=0"):
        OmniattnCallback(norm=0)
    trainer, _ = train(tmp_path, [OmniattnCallback(norm=False, mlp=False)])
    assert not hasattr(type(trainer.model.model.norm), "omniattn_original")
    before = type(trainer.model.lm_head)
    OmniattnCallback().on_train_begin(None, None, None, model=trainer.model)
    assert type(trainer.model.lm_head) is before
