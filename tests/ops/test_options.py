"""Options that several functions share are declared once, and help() shows each of them."""

import inspect
from types import FunctionType

import pytest
import torch

from omniattn import functional, reference
from omniattn.encoding.losses import (
    CrossEntropy,
    CrossEntropyOptions,
    Divergence,
    DivergenceOptions,
)
from omniattn.encoding.options import (
    AttentionOptions,
    FormOptions,
    Options,
    ScoreOptions,
    SelectedOptions,
    SelectiveOptions,
    WeightOptions,
)
from omniattn.encoding.sequences import SequenceOptions, Sequences, StateOptions

#: Options by the record that has their defaults; the first have all of its fields.
RECORDS = {
    CrossEntropy: (CrossEntropyOptions,),
    Divergence: (DivergenceOptions,),
    Sequences: (SequenceOptions, StateOptions),
    Options: (
        AttentionOptions,
        WeightOptions,
        FormOptions,
        ScoreOptions,
        SelectedOptions,
        SelectiveOptions,
    ),
}
FUNCTIONS = {
    f"{room.__name__}.{name}": function
    for room in (functional, reference)
    for name in room.__all__
    if isinstance(function := getattr(room, name), FunctionType)
}


@pytest.mark.parametrize("record", RECORDS)
def test_names_and_types_of_options_are_those_of_their_record(record):
    whole, *parts = RECORDS[record]
    assert {*whole.__annotations__} == {*record._fields} == {*record._field_defaults}
    for names in (whole, *parts):
        for name, hint in names.__annotations__.items():
            assert hint.__forward_arg__ == record.__annotations__[name].__forward_arg__


def test_help_shows_all_keywords_and_their_defaults():
    for name, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters
        if name.startswith("omniattn.functional."):
            assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values()), name
        declared = inspect.unwrap(function).__annotations__.get("options", "")
        for record, kinds in RECORDS.items():
            for names in kinds:
                if declared == f"Unpack[{names.__name__}]":
                    shown = {n: parameters[n].default for n in names.__annotations__}
                    assert shown == {n: record._field_defaults[n] for n in shown}, name


@pytest.mark.parametrize("room", [functional, reference])
def test_a_form_of_attention_refuses_options_of_others(room):
    q = torch.ones(1, 4, 1, 8)
    with pytest.raises(TypeError, match=r"^longformer_attention\(\) .* argument 'sinks'"):
        room.longformer_attention(q, q, q, window=2, sinks=None)
    with pytest.raises(TypeError, match=r"^moba_attention\(\) .* 'softcup'; did you .* 'softcap'"):
        room.moba_attention(q, q, q, block_size=2, topk=1, softcup=1.0)


def test_a_form_of_attention_names_itself_where_an_option_is_wrong():
    q = torch.ones(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"^selective_attention: dropout_p must be"):
        functional.selective_attention(q, q, q, dropout_p=2.0)
    with pytest.raises(ValueError, match=r"^longformer_attention: scale, softcap and scale / "):
        functional.longformer_attention(q, q, q, window=2, scale=1e39)
    with pytest.raises(ValueError, match=r"^routed_block_attention: softcap must be"):
        functional.routed_block_attention(q, q, q, q, q, block_size=1, topk=1, softcap=-1.0)


def test_definitions_of_recurrences_refuse_options_of_the_formula_and_a_backend():
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(TypeError, match=r"^gated_linear_attention\(\) .* argument 'beta'"):
        reference.gated_linear_attention(q, q, q, -q, beta=q)
    with pytest.raises(TypeError, match=r"^rwkv7\(\) .* argument 'backend'"):
        reference.rwkv7(q, -q, q, q, q, q, backend="cpu")


@pytest.mark.parametrize("room", [functional, reference])
def test_losses_refuse_unknown_options(room):
    x, target = torch.ones(2, 3), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"^linear_cross_entropy\(\) .* did you .* 'reduction'"):
        room.linear_cross_entropy(x, x, target, reductio="sum")
    with pytest.raises(TypeError, match=r"^linear_jsd\(\) .* argument 'softcap'"):
        room.linear_jsd(x, x, x, x, softcap=1.0)
