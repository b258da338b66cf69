"""Heads of transformers' classifiers: names of their layers, and what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from omniattn.models.decoders.decoder import Decoder
from omniattn.models.encoders.text_encoder import TextEncoderConfig
from omniattn.models.hf import Counterpart
from omniattn.models.model import ModelConfig

#: Ends of the names of transformers' classes with another head; the first one is preferred.
_HEADS = ("ForPreTraining", "ForCausalLM", "LMHeadModel", "ForMaskedLM")


@dataclass(frozen=True)
class Form:
    """Head of a classifier in transformers: names of its layers, and what it computes."""

    classifier: str
    transform: str | None = None
    activation: str | None = None
    bias: bool = True


#: model_type of an encoder -> head for texts; others have none.
TEXTS = {
    "bert": Form("classifier", "bert.pooler.dense", "tanh"),
    "roberta": Form("classifier.out_proj", "classifier.dense", "tanh"),
    "electra": Form("classifier.out_proj", "classifier.dense", "gelu"),
    "big_bird": Form("classifier.out_proj", "classifier.dense", "gelu_tanh"),
    "longformer": Form("classifier.out_proj", "classifier.dense", "tanh"),
    "deberta": Form("classifier", "pooler.dense", "gelu"),
    "deberta-v2": Form("classifier", "pooler.dense", "gelu"),
}
#: model_type of decoders whose head for tokens is not called `score`.
CLASSIFIERS = ("gpt2", "bloom", "mpt", "falcon")


def stem_of(kind: type[ModelConfig]) -> str | None:
    """Returns the beginning of the names of transformers' classes, such as Llama."""
    if kind.hf is None or not issubclass(kind, Decoder.Config | TextEncoderConfig):
        return None
    stem = re.sub(f"({'|'.join(_HEADS)})$", "", kind.hf.model)
    return None if stem == kind.hf.model else stem


def kind_of(test: Callable[[Counterpart, str], bool]) -> type[ModelConfig] | None:
    """Returns the kind of decoder or encoder whose counterpart and stem pass the test."""
    found: dict[str, type[ModelConfig]] = {}
    for kind in ModelConfig.architectures.values():
        stem = stem_of(kind)
        if kind.hf is not None and stem is not None and test(kind.hf, stem):
            found.setdefault(kind.hf.model.removeprefix(stem), kind)
    return next((found[head] for head in _HEADS if head in found), None)
