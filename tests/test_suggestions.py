"""Unknown keywords, presets, commands and options are told what may be meant."""

import inspect
import subprocess
import sys
from types import FunctionType

import pytest
import torch

from omniattn import compare, compat, functional, hf, models, modules, training
from omniattn.functional import masks, scores
from omniattn.models import PRESETS, ModelConfig
from omniattn.modules.base.layer import Layer
from omniattn.suggestions import did_you_mean
from omniattn.training import TrainConfig

PACKAGES = (functional, masks, scores, compare, compat, models, modules, training, hf)
PLACES = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


LIGHTNING = {**dict.fromkeys("qkv", torch.zeros(1, 2, 1, 4)), "layer_idx": 1}
#: Arguments that are checked before the keywords.
NEEDED = {
    "chunk_lightning_attn": LIGHTNING,
    "fused_recurrent_lightning_attn": LIGHTNING,
    "attention": dict.fromkeys("qkv", torch.zeros(1, 2, 1, 4)),
    "attention_cached": {
        **dict.fromkeys("qkv", torch.zeros(1, 2, 1, 4)),
        "cache_seqlens": torch.ones(1, dtype=torch.int32),
    },
    "attention_int8": {
        "q": torch.zeros(1, 2, 1, 4),
        **dict.fromkeys("kv", torch.zeros(1, 2, 1, 4, dtype=torch.int8)),
        **dict.fromkeys(("k_scale", "v_scale"), torch.zeros(1, 2, 1)),
        "cache_seqlens": torch.ones(1, dtype=torch.int32),
    },
    "attention_varlen": {
        **dict.fromkeys("qkv", torch.zeros(2, 1, 4)),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 2])),
    },
    "attention_weights": {
        **dict.fromkeys("qk", torch.zeros(1, 2, 1, 4)),
        "lse": torch.zeros(1, 1, 2),
    },
}


def inits(cls):
    """Constructors in Python of this package."""
    ours = (c for c in cls.__mro__ if c.__module__.startswith("omniattn."))
    return [f for c in ours if isinstance(f := vars(c).get("__init__"), FunctionType)]


def callables():
    """Public functions, and classes whose constructor is their own, by their names."""
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            concrete = isinstance(value, type) and not inspect.isabstract(value)
            if value is hf.OmniattnConfig:  # which keeps all, as configs of transformers do
                continue
            if isinstance(value, FunctionType) or (concrete and value.__init__ in inits(value)):
                yield f"{package.__name__}.{name}", value
    for name, layer in Layer.layers.items():
        if layer.__module__.startswith("omniattn."):
            yield f"{name}.Config", layer.Config
    for config in ModelConfig.architectures.values():
        yield config.__qualname__, config


CALLABLES = dict(callables())


@pytest.mark.parametrize("name", CALLABLES)
def test_of_keywords(name):
    function = CALLABLES[name]
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in PLACES]
    required = [p for p in parameters if p.default is p.empty]
    needed = {p.name: 2 if p.annotation in (int, "int") else torch.zeros(()) for p in required}
    needed |= NEEDED.get(name.rpartition(".")[2], {})
    for parameter in parameters:
        typo = parameter.name + "s"
        if len(typo) < 5 or typo in inspect.signature(function).parameters:
            continue
        with pytest.raises((TypeError, NotImplementedError)) as caught:
            function(**needed | {typo: 1})
        assert f"id you mean '{parameter.name}'?" in str(caught.value), caught.value


def test_of_names_in_other_libraries():
    q = torch.zeros(1, 2, 1, 4)
    for name, ours in (
        ("is_causal", "causal"),
        ("softmax_scale", "scale"),
        ("attn_mask", "mask"),
        ("key_padding_mask", r"mask'\? masks.KeyPadding\(real\)"),
    ):
        with pytest.raises(TypeError, match=f"argument '{name}'; did you mean '{ours}"):
            functional.attention(q, q, q, **{name: 1})
    with pytest.raises(TypeError, match="did you mean 'num_heads'"):
        modules.Attention(8, n_head=2)
    if sys.version_info < (3, 13):  # which knows near names alone
        with pytest.raises(TypeError, match="did you mean 'lr'"):
            TrainConfig(learning_rate=1.0)


def test_of_presets_and_choices():
    with pytest.raises(KeyError, match="did you mean 'llama-2-7b'"):
        PRESETS["llama2-7b"]
    assert "lama" not in PRESETS and PRESETS.get("lama") is None
    with pytest.raises(ValueError, match="got model='jmba'; did you mean 'jamba'"):
        TrainConfig(model="jmba")
    with pytest.raises(ValueError, match="got activation='swiglue'; did you mean 'swiglu'"):
        modules.GatedMLP(8, 8, activation="swiglue")
    with pytest.raises(TypeError, match="got dtyp=1; did you mean 'dtype'"):
        modules.Attention(8, 2).new_state(1, 2, dtyp=1)
    with pytest.raises(TypeError, match="got norms=True; did you mean 'norm'"):
        hf.OmniattnCallback(norms=True)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "; did you mean 'train'?"),
        (["train", "--lenght", "3"], "; did you mean '--length'?"),
        (["train", "--dtype", "bfloat"], "; did you mean 'bfloat16'?"),
        (["train", "--model", "lama"], "; did you mean 'llama'?"),
        (["info", "--wxyz"], "unrecognized arguments: --wxyz; omniattn info"),
    ],
)
def test_of_commands(arguments, hint):
    command = [sys.executable, "-m", "omniattn", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert hint in result.stderr and result.stderr.count("\n") == 1


def test_what_is_not_near_gets_no_suggestion():
    assert did_you_mean("colour", ["size", "eps"]) == ""
    assert did_you_mean(3, ["size"]) == did_you_mean("is_causal", ["size"]) == ""


def test_an_error_of_a_call_inside_stays_as_it_is():
    def mask(b, h, q, k):
        return functional.rms_norm(q, wieght=1)

    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(TypeError, match=r"'wieght'.*id you mean 'weight'"):
        functional.attention(q, q, q, mask=mask)
