"""omniattn generate: checkpoints of bytes, folders of transformers, and errors."""

import pytest
import torch

from omniattn.cli import main
from omniattn.models import (
    PRESETS,
    BertClassifierConfig,
    BertConfig,
    T5Config,
    generate,
    save_model,
)

GREEDY = ["--max-new-tokens", "6", "--temperature", "0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = PRESETS["llama-tiny"].build()
    path = tmp_path_factory.mktemp("run") / "checkpoint.safetensors"
    save_model(model, path)
    return model, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of save_pretrained, with a tokenizer of words w0 .. w96."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    model = PRESETS["llama-test"].build()
    theirs = model.to_hf()
    theirs.generation_config.eos_token_id = [20, 21]
    theirs.save_pretrained(path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return model, path


def output(capsys, *arguments) -> str:
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_continues_bytes(checkpoint, capsys):
    model, path = checkpoint
    text = "h\u00e9"
    prompt = torch.tensor([list(text.encode())])
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
    wanted = generate(model, prompt, 20, **drawn)
    printed = output(capsys, path, "--prompt", text, "--max-new-tokens", 20, "--seed", 3)
    assert printed == bytes(wanted[0].tolist()).decode(errors="replace")
    assert (
        output(capsys, path.parent, "--prompt", text, "--max-new-tokens", 20, "--seed", 3)
        == printed
    )


def test_a_folder_of_transformers_brings_its_tokenizer(folder, capsys):
    model, path = folder
    prompt = torch.tensor([[5, 17, 3]])
    wanted = generate(model, prompt, 6, eos=[20, 21])[0].tolist()
    assert wanted[-1] == 20
    words = " ".join(f"w{i}" for i in wanted)
    assert output(capsys, path, "--prompt", "w5 w17 w3", *GREEDY) == words
    stopped = output(capsys, path, "--prompt", "w5 w17 w3", *GREEDY, "--stop", f"w{wanted[4]}")
    assert stopped == " ".join(f"w{i}" for i in wanted[: wanted.index(wanted[4], 3) + 1])
    ids = output(capsys, path, "--tokens", "5, 17 3", "--max-new-tokens", 6, "--num-beams", 3)
    best = generate(model, prompt, 6, num_beams=3, eos=[20, 21])[0]
    assert ids == " ".join(map(str, best.tolist()))


def test_an_encoder_decoder_reads_the_prompt(tmp_path, capsys):
    torch.manual_seed(0)
    model = T5Config(vocab_size=37, dim=32, num_layers=1, hidden_dim=64).build()
    save_model(model, tmp_path / "t5.safetensors")
    source = torch.tensor([[4, 9, 2]])
    wanted = generate(model, torch.zeros(1, 1, dtype=torch.long), 6, source=source)[0, 1:]
    given = [str(tmp_path / "t5.safetensors"), "--tokens", "4,9,2", *GREEDY]
    assert output(capsys, *given) == " ".join(map(str, wanted.tolist()))
    assert main(["generate", *given, "--kv-dtype", "int8"]) == 1
    assert "--kv-dtype needs a decoder, got a T5" in capsys.readouterr().err


def test_keys_and_values_in_int8(checkpoint, capsys):
    model, path = checkpoint
    prompt = torch.tensor([list(b"The")])
    wanted = generate(model, prompt, 6, kv_dtype=torch.int8)[0]
    printed = output(capsys, path, "--prompt", "The", *GREEDY, "--kv-dtype", "int8")
    assert printed == bytes(wanted.tolist()).decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/file", "--prompt", "a"], "/no/such/file must be a checkpoint, the folder"),
        (["{path}", "--tokens", "5,x"], "--tokens needs token ids, such as 5,17,3, got '5,x'"),
        (["{path}", "--prompt", ""], "--prompt, --tokens and --stop must have at least one token"),
        (["{path}", "--tokens", "500"], "tokens must be in [0, 256), got tokens from 500"),
        (["{path}", "--prompt", "a", "--top-p", "3"], "top_p must be a finite number > 0"),
        (
            ["{path}", "--prompt", "a", "--num-beams", "2", "--temperature", "1"],
            "temperature must be 0 with num_beams=2",
        ),
        (["{path}", "--prompt", "a", "--num-draft-tokens", "1"], "must be at most 0"),
        (["{path}", "--prompt", "a", "--device", "tpu"], "cannot use --device tpu: "),
        (["{path}", "--prompt", "a", "--device", "meta"], "device meta: it must be cpu or cuda"),
        (["{path}", "--prompt", "a", "--backend", "cuda"], "--backend cuda with --device cpu"),
    ],
)
def test_errors_are_one_line(checkpoint, capsys, arguments, message):
    arguments = [a.format(path=checkpoint[1]) for a in arguments]
    assert main(["generate", *arguments]) == 1
    printed = capsys.readouterr()
    error = printed.err.splitlines()
    assert len(error) == 1 and error[0].startswith("generate: ") and message in error[0]
    assert not printed.out


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PRESETS["vit"], "ViT"),
        (BertConfig(vocab_size=37, dim=32, num_layers=1, num_heads=2, hidden_dim=64), "Bert"),
        (
            BertClassifierConfig(classes=3, dim=32, num_layers=1, num_heads=2, hidden_dim=64),
            "BertClassifier",
        ),
    ],
)
def test_a_model_without_tokens_is_named(tmp_path, capsys, config, name):
    path = tmp_path / "model.safetensors"
    save_model(config.build(), path)
    assert main(["generate", str(path), "--prompt", "a"]) == 1
    assert f"holds a {name}, which generates no tokens" in capsys.readouterr().err


def test_weights_of_transformers_are_not_called_damaged(folder, capsys):
    path = folder[1] / "model.safetensors"
    assert main(["generate", str(path), "--prompt", "a"]) == 1
    assert "is loaded from its folder" in capsys.readouterr().err
