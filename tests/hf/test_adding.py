"""The kind of layer of docs/adding.md, added as the page says, is patched and computes the same."""

import inspect
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import transformers as hf

ROOT = Path(__file__).parents[2]


def examples():
    page = (ROOT / "docs/adding.md").read_text()
    section = page.partition("## A layer of transformers\n")[2]
    return [textwrap.dedent(e) for e in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


def load(monkeypatch, name, **edits):
    """Returns a module of omniattn.hf.patching after edits: what each replaces, by a word in it."""
    text = (ROOT / f"python/omniattn/hf/patching/{name}.py").read_text()
    for old, new in edits.values():
        assert text.count(old) == 1
        text = text.replace(old, new)
    module = types.ModuleType(f"omniattn.hf.patching.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


@pytest.fixture
def patching(monkeypatch):
    forward, finder = examples()
    layers = sys.modules["omniattn.hf.patching.layers"]
    names = dict(vars(layers))
    exec(forward, names)
    monkeypatch.setattr(layers, "conv1d", names["conv1d"], raising=False)
    load(
        monkeypatch,
        "find",
        imported=("import copy\n", "import copy\nimport functools\n"),
        option=("    experts: bool\n", "    experts: bool\n    conv1d: bool\n"),
        finder=("#: Option of `patch` ->", f"{finder}\n\n#: Option of `patch` ->"),
        entry=('    "norm": _norm,\n', '    "norm": _norm,\n    "conv1d": _conv1d,\n'),
    )
    return load(monkeypatch, "patch")


def gpt2():
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=97, n_positions=40, n_embd=48, n_layer=2, n_head=4)
    return hf.GPT2LMHeadModel(config).eval()


def test_new_kind_of_layer_is_patched(patching):
    model, tokens = gpt2(), torch.randint(97, (2, 9))
    expected = model(tokens, labels=tokens)
    (wanted,) = torch.autograd.grad(expected.loss, model.transformer.h[0].mlp.c_fc.weight)
    others = dict.fromkeys(("attention", "linear", "norm", "loss"), False)
    assert patching.patch(model, **others) == {"conv1d": 8}
    assert list(inspect.signature(patching.patch).parameters)[-1] == "conv1d"
    actual = model(tokens, labels=tokens)
    (found,) = torch.autograd.grad(actual.loss, model.transformer.h[0].mlp.c_fc.weight)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(found, wanted)
    patching.unpatch(model)
    assert torch.equal(model(tokens).logits, expected.logits)


def test_new_kind_of_layer_can_be_left(patching):
    assert "conv1d" not in patching.patch(gpt2(), conv1d=False)
