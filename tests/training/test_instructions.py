"""Instructions: labels, packing against padding, models of both kinds, LoRA, bad input."""

import json

import peft
import pytest
import torch
from small_presets import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from omniattn.hf import OmniattnForCausalLM, patch
from omniattn.models import PRESETS, BertConfig
from omniattn.models import LlamaConfig as OwnLlamaConfig
from omniattn.training import InstructionCollator, Instructions, TrainConfig, Trainer, task_of

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = [
    {"prompt": [5, 6, 7], "answer": [8, 9]},
    {"prompt": [4], "answer": [3, 2, 1, 11, 12]},
    {"prompt": [], "answer": [21, 22]},
]


def alone(model, loss_of):
    """Loss of the answers, each example in a call of its own."""
    total, count = 0.0, 0
    for example in EXAMPLES:
        ids = torch.tensor([example["prompt"] + example["answer"] + [0]])
        targets = ids[:, 1:].clone()
        targets[:, : max(0, len(example["prompt"]) - 1)] = -100
        kept = int((targets >= 0).sum())
        total, count = total + kept * loss_of(model, ids, targets), count + kept
    return total / count


def decoder_loss(model, ids, targets):
    return model(ids[:, :-1], targets)


def labelled_loss(model, ids, targets):
    labels = torch.nn.functional.pad(targets, (1, 0), value=-100)
    return model(input_ids=ids, labels=labels).loss


def test_labels_positions_and_masks():
    packed = InstructionCollator(end=0)(EXAMPLES)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 4, 3, 2, 1, 11, 12, 0, 21, 22, 0]]
    assert packed["position_ids"].tolist() == [[*range(6), *range(7), *range(3)]]
    no = -100
    labels = [no, no, no, 8, 9, 0, no, 3, 2, 1, 11, 12, 0, no, 22, 0]
    assert packed["labels"].tolist() == [labels]
    padded = InstructionCollator(end=0, pad=77, packed=False)(EXAMPLES)
    assert padded["input_ids"][2].tolist() == [21, 22, 0, 77, 77, 77, 77]
    assert padded["labels"][2].tolist() == [no, 22, 0, no, no, no, no]
    assert padded["attention_mask"].sum(-1).tolist() == [6, 7, 3]
    tokens, targets = InstructionCollator(end=0).batch(EXAMPLES)
    assert tokens.is_nested and tokens.unbind()[0].tolist() == [5, 6, 7, 8, 9]
    assert targets.unbind()[0].tolist() == [no, no, 8, 9, 0]


@pytest.mark.parametrize("name", ["llama-test", "mamba2", "gated-deltanet", "rwkv7", "jamba"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_examples_do_not_see_one_another(name, packed):
    torch.manual_seed(0)
    model = (SMALL.get(name) or PRESETS[name]).build(dtype=torch.float64).eval()
    collate = InstructionCollator(end=0, packed=packed)
    with torch.no_grad():
        expected = alone(model, decoder_loss)
        torch.testing.assert_close(model(*collate.batch(EXAMPLES)), expected)
        wrapped = OmniattnForCausalLM.wrap(model)
        torch.testing.assert_close(wrapped(**collate(EXAMPLES)).loss, expected)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_models_of_transformers(packed):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).double().eval()
    collate = InstructionCollator(end=0, packed=packed)
    with torch.no_grad():
        expected = alone(model, labelled_loss).double()  # transformers' loss is in fp32
        patch(model)
        loss = model(**collate(EXAMPLES), use_cache=False).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["causal-lm", "plain"])
def test_lora_learns_the_answers_and_leaves_the_model(kind):
    torch.manual_seed(0)
    model = PRESETS["llama-test"].build()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    collate = InstructionCollator(end=0)
    if kind == "plain":
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        adapted = peft.get_peft_model(model, config)
        batch = collate.batch(EXAMPLES)
    else:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear"
        )
        adapted = peft.get_peft_model(OmniattnForCausalLM.wrap(model), config)
        batch = collate(EXAMPLES)

    def loss():
        return adapted(*batch) if kind == "plain" else adapted(**batch).loss

    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-2)
    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    last = loss().item()
    assert last < first - 0.3
    with adapted.disable_adapter():
        assert loss().item() == pytest.approx(first)
    merged = adapted.merge_and_unload()
    merged = merged if kind == "plain" else merged.model
    assert merged(*collate.batch(EXAMPLES)).item() == pytest.approx(last, rel=1e-4)
    changed = {n for n, t in merged.state_dict().items() if not torch.equal(t, before[n])}
    assert changed and all("proj" in name for name in changed)


def test_texts_are_encoded_apart():
    collate = InstructionCollator(encode=lambda text: list(text.encode()))
    batch = collate([{"prompt": "ab", "answer": "c"}])
    assert batch["input_ids"].tolist() == [[97, 98, 99]]
    assert batch["labels"].tolist() == [[-100, -100, 99]]


@pytest.mark.parametrize(
    ("options", "examples", "text"),
    [
        ({}, [], r"examples must not be empty"),
        ({}, [{"prompt": [1]}], r"mappings with prompt and answer, got examples\[0\]=\{'prompt'"),
        ({}, [{"prompt": "a", "answer": "b"}], r"encode must be given for texts, got prompt='a'"),
        ({}, [{"prompt": [1], "answer": []}], r"got examples\[0\] of 1 and 0 tokens"),
        ({}, [{"prompt": [], "answer": [1]}], r"got examples\[0\] of 0 and 1 tokens"),
        (
            {},
            [{"prompt": [1.5], "answer": [1]}],
            r"ids >= 0, got examples\[0\] with prompt=\[1.5\]",
        ),
        ({}, [{"prompt": [-1], "answer": [1]}], r"with prompt=\[-1\]"),
        ({"max_length": 2}, EXAMPLES, r"at most max_length=2 tokens, got 5 in examples\[0\]"),
        ({"max_length": 1}, EXAMPLES, r"max_length must be an int >= 2, got max_length=1"),
        ({"pad": -1}, EXAMPLES, r"pad must be an int >= 0, got pad=-1"),
    ],
)
def test_bad_input_is_named(options, examples, text):
    with pytest.raises(ValueError, match=f"InstructionCollator: .*{text}"):
        InstructionCollator(**options)(examples)


def written(tmp_path, lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_file_of_instructions_is_learned(tmp_path):
    """Only answers have a loss, the held-out examples are left out, and the model answers."""
    pairs = [{"prompt": f"{i % 5}+{i % 3}=", "answer": f"{i % 5 + i % 3}"} for i in range(45)]
    task = Instructions.load(written(tmp_path, [json.dumps(pair) for pair in pairs]), 16)
    assert task.held_out == pairs[::20] and len(task.train) == 42
    tokens, targets = task.batch(8, 0, 3)
    assert torch.equal(tokens, task.batch(8, 0, 3)[0])
    assert not torch.equal(tokens, task.batch(8, 0, 4)[0])
    answers = {bytes(row[row >= 0].tolist()) for row in targets}
    assert answers <= {f"{i}\0".encode() for i in range(7)}
    model = OwnLlamaConfig(vocab_size=256, dim=32, num_layers=1, num_heads=2, hidden_dim=64)
    options = {"model": model, "steps": 60, "batch": 16, "lr": 1e-2, "task": "instructions"}
    run = Trainer(TrainConfig(**options), task)
    for _ in range(60):
        run.train_step()
    run.evaluate()
    assert run.losses[-1] < 0.3 * run.losses[0] and run.held_out[-1]["right answers"] > 0.3
    shown = task.sample(run.model, 0).splitlines()
    assert [line.partition("[")[0] for line in shown] == [pair["prompt"] for pair in pairs[::20]]
    assert all(line.endswith("]") for line in shown)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{"], "line 1 is no JSON"),
        (['{"prompt": "a", "answer": "b"}', "[1]"], r"line 2 must have the texts prompt and answ"),
        (['{"prompt": "a", "answer": 1}'], "line 1 must have the texts prompt and answer"),
        (['{"prompt": "a", "answer": "b"}'], "examples must be at least two, got 1"),
        (['{"prompt": "abcdefg", "answer": "hi"}'] * 2, "at most max_length=9 tokens, got 10"),
    ],
)
def test_files_that_hold_no_instructions_are_named(tmp_path, lines, text):
    with pytest.raises(ValueError, match=text):
        Instructions.load(written(tmp_path, lines), 8)


def test_instructions_are_for_decoders():
    assert task_of(OwnLlamaConfig(), "instructions") is Instructions
    with pytest.raises(ValueError, match="got 'instruction'; did you mean 'instructions'"):
        task_of(OwnLlamaConfig(), "instruction")
    with pytest.raises(ValueError, match="must be that of a decoder for instructions, got BertC"):
        task_of(BertConfig(), "instructions")
    with pytest.raises(ValueError, match=r"task must be one of .*instructions.*, got task='chat'"):
        TrainConfig(task="chat")
    with pytest.raises(ValueError, match="instructions need a file with a JSON object in each"):
        Instructions.load(None, 8)
