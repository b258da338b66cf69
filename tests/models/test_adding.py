"""The model of docs/adding.md, added as the page says, computes what transformers does."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from omniattn.models import Model, ModelConfig, generate

PAGE = (Path(__file__).parents[2] / "docs/adding.md").read_text()
MODULE = """
from __future__ import annotations
from dataclasses import dataclass
from omniattn.models.decoders.family import HEAD_DIM, llama_counterpart
from omniattn.models.decoders.llama import LlamaConfig
from omniattn.modules import MLP
"""


def examples():
    section = re.search(r"^## A model\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]
    return [textwrap.dedent(e) for e in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


@pytest.fixture
def config(monkeypatch):
    """The class of the first example, in a module as its file would be."""
    known = dict(ModelConfig.architectures)
    module = types.ModuleType("omniattn.models.families.arcee")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(MODULE + examples()[0], vars(module))
    yield module.ArceeConfig
    ModelConfig.architectures.clear()
    ModelConfig.architectures.update(known)


def test_release_has_as_many_parameters_as_in_transformers(config):
    sizes = eval(examples()[1].strip(), {"ArceeConfig": config})
    with torch.device("meta"):
        theirs = sizes.build_hf()
    assert sizes.num_parameters == theirs.num_parameters()
    assert type(sizes).from_dict(sizes.to_dict()) == sizes


@torch.no_grad()
def test_transformers_gives_the_same_logits_and_tokens(config):
    torch.manual_seed(0)
    small = config(vocab_size=97, dim=48, num_layers=2, num_heads=4, hidden_dim=40, head_dim=16)
    ours = small.build(dtype=torch.float64).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs, tokens = ours.to_hf(), torch.randint(97, (2, 33))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits.double(), rtol=1e-5, atol=1e-5)
    back = Model.from_hf(theirs)
    assert back.config == small
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)
    options = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(generate(ours, tokens, 5), theirs.generate(tokens, **options))
