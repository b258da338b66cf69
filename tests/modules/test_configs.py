"""Behaviour that every module gets from its Config: construction, checks, printing,
initialisation."""

import dataclasses
import inspect
import math
import re

import pytest
import torch
from small_layers import FIELDS, LAYERS, NORM, OTHERS, valid_config

from omniattn import functional, modules, reference
from omniattn.models.presets import TRAINED
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    GatedMLP,
    KVCache,
    LayerNorm,
    Linear,
    MoE,
    MultiheadAttention,
    PagePool,
    Residual,
    RMSNorm,
    RollingCache,
    RotaryEmbedding,
)
from omniattn.modules.base import fields
from omniattn.modules.base.fields import Size


@pytest.mark.parametrize("name", LAYERS)
def test_errors_of_a_config_show_the_sizes_of_tensors(name):
    config, wrong = valid_config(name), torch.full((30, 20), 0.8125)
    for field in dataclasses.fields(config):
        for value in (wrong, (wrong, wrong), [wrong.tolist()]):
            try:
                dataclasses.replace(config, **{field.name: value})
            except (TypeError, ValueError) as error:
                message = str(error)
                assert len(message) < 1200 and "\n" not in message, message
                assert isinstance(value, list) or "0.8125" not in message, message


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_takes_its_config_or_the_fields_of_it(name):
    module, fields, others = getattr(modules, name), FIELDS[name], OTHERS.get(name, {})
    make = getattr(module.Config, "of", module.Config)
    config = valid_config(name)
    first, *rest = fields  # fields in the order of the config, at first without names
    for built in (
        module(config, **others),
        module(config=config, **others),
        module(**fields, **others),
        module(fields[first], **{n: fields[n] for n in rest}, **others),
    ):
        assert getattr(built, "config", config) == config
    parameters = inspect.signature(module).parameters
    expected = [*inspect.signature(make).parameters]
    assert [name for name in parameters if name in expected] == expected
    if "device" in parameters:
        built = module(**fields, **others, device="meta")
        assert all(p.is_meta for p in built.parameters())
    message = f"{name}: must have a {name}.Config or its fields, got nothing"
    if any(p.default is p.empty for p in inspect.signature(make).parameters.values()):
        with pytest.raises(TypeError, match=re.escape(message)):
            module()
    with pytest.raises(TypeError, match=re.escape(f"{name}: config must be a {name}.Config")):
        module(config=8, **others)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RMSNorm(0), ValueError, "RMSNorm: dim must be an integer >= 1, got dim=0"),
        (lambda: RMSNorm("8"), TypeError, "RMSNorm: dim must be int, got dim='8'"),
        (lambda: RMSNorm(8, epsilon=1.0), TypeError, "the fields are dim, eps, offset, casting"),
        (
            lambda: RMSNorm(NORM, eps=1.0),
            TypeError,
            "got both a config and eps; dataclasses.replace",
        ),
        (
            lambda: GatedMLP(MLP.Config(6, 10)),
            TypeError,
            "GatedMLP: must have a GatedMLP.Config or its fields, got MLP.Config(dim=6",
        ),
    ],
)
def test_wrong_fields_of_a_module_are_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_prints_the_arguments_that_make_its_config(name):
    config = valid_config(name)
    parts = {
        field.name: value
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), modules.base.layer.LayerConfig)
    }
    shown = eval(f"dict({config.as_arguments()})")  # as help(module) names them
    assert type(config)(**shown, **parts) == config
    built = getattr(modules, name)(config, **OTHERS.get(name, {}))
    first = repr(built).removeprefix(f"{name}(").strip()
    assert first.startswith(config.as_arguments()) or built.config != config  # set by its layer


def test_whether_attention_is_causal_is_shown():
    assert "causal=True" in repr(Attention(8, 2))
    assert "causal=False" in repr(Attention(8, 2, causal=False))
    assert inspect.signature(functional.attention).parameters["causal"].default is False


def test_a_residual_takes_its_layer_and_then_its_config_or_the_fields_of_it():
    config = Residual.Config(NORM, "sandwich")
    for built in (
        Residual(torch.nn.Identity(), config),
        Residual(torch.nn.Identity(), NORM, "sandwich"),
        Residual(layer=torch.nn.Identity(), norm=NORM, placement="sandwich", device="meta"),
    ):
        assert built.config == config
        assert "placement='sandwich'" in repr(built)
    with pytest.raises(TypeError, match="Residual: must have a Residual"):
        Residual(torch.nn.Identity(), NORM, place="post")


def test_a_subclass_may_have_arguments_of_its_own():
    class Wide(RMSNorm):
        def __init__(self, *, factor: int) -> None:
            super().__init__(8 * factor, device="meta")

    assert Wide(factor=2).weight.shape == (16,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RMSNorm.Config(0), "RMSNorm: dim must be an integer >= 1, got dim=0"),
        (lambda: Linear.Config(4, 2.0), "out_features must be an integer >= 1"),
        (lambda: MLP.Config(6, -1), "MLP: hidden_dim must be an integer >= 1"),
        (
            lambda: MoE.Config.of(6, 4, 2, 1, shared_hidden_dim=-1),
            "GatedMLP: hidden_dim must be an int",
        ),
        (lambda: MultiheadAttention.Config(8, 0), "num_heads must be an integer >= 1"),
        (lambda: Attention.Config(8, 2, num_kv_heads=-1), "num_kv_heads must be an integer >= 1"),
        (lambda: RMSNorm.Config(4, casting="half"), "casting must be one of ('fp32', 'llama')"),
        (lambda: LayerNorm.Config(4, eps=float("nan")), "eps must be finite and >= 0, got eps=nan"),
        (
            lambda: Attention.Config(8, 2, qk_norm_eps=-1.0),
            "qk_norm_eps must be finite and >= 0, got qk_norm_eps=-1.0",
        ),
        (lambda: RMSNorm.Config(None), "RMSNorm: dim must be int, got dim=None"),
        (lambda: RMSNorm.Config(4, eps="1"), "RMSNorm: eps must be float, got eps='1'"),
        (lambda: MoE.Config.of(6, 4, 2, [1]), "Router: top_k must be int, got top_k=[1]"),
        (lambda: MLP.Config(6, 4, dropout_p=math.inf), "MLP: dropout_p must be finite, got"),
        (lambda: RMSNorm.Config(True), "RMSNorm: dim must be int, got dim=True"),
        (lambda: MLP.Config(6, 4, init_std=-1.0), "MLP: init_std must be"),
        (lambda: MLP.Config(6, 4, dropout_p=1.5), "MLP: dropout_p must be"),
        (lambda: MLP.Config(6, 4, dropout_p=2), "MLP: dropout_p must be a finite number >= 0 and"),
        (lambda: MultiheadAttention.Config(8, 2, dropout=-1.0), "MultiheadAttention: dropout must"),
        (
            lambda: modules.DifferentialAttention.Config(8, 2, 1, window_size=(1,)),
            "DifferentialAttention: window_size must be two ints",
        ),
        (
            lambda: modules.BigBirdAttention.Config(8, 2, block=0),
            "BigBirdAttention: block must be an int >= 1, got block=0",
        ),
        (
            lambda: DecoderBlock.Config(Linear.Config(4, 4), MLP.Config(4, 4), RMSNorm.Config(4)),
            "DecoderBlock: mixer must be the Config of ABCAttention, ",
        ),
        (
            lambda: Attention(Attention.Config(8, 2))(torch.ones(5, 8)),
            "Attention: x must have shape (B, T, 8), got x.shape=(5, 8)",
        ),
    ],
)
def test_sizes_and_options_are_checked_where_they_are_given(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


@dataclasses.dataclass(frozen=True)
class Own(modules.LayerConfig):
    size: Size
    part: Size | None = None
    share: "fields.Probability | None" = None
    sizes: tuple[Size, ...] = ()


def test_kinds_are_the_types_of_fields_and_checks():
    types = "(size: int, part: int | None = None, share: 'float | None' = None"
    assert str(inspect.signature(Own)).startswith(types)
    Own(1, 2, 0.5, (3,))
    for given, message in [
        ((0,), "Own: size must be an integer >= 1, got size=0"),
        ((1, 0), "Own: part must be an integer >= 1, got part=0"),
        ((1, "2"), "Own: part must be int | None, got part='2'"),
        ((1, 2, 1.5), "Own: share must be a finite number >= 0 and <= 1, got share=1.5"),
    ]:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            Own(*given)


def test_a_field_that_a_subclass_declares_again_has_the_kind_of_the_subclass():
    @dataclasses.dataclass(frozen=True)
    class Lower(Own):
        size: int

    assert Lower(0).size == 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_names_an_argument_that_is_no_tensor(name):
    layer = getattr(modules, name)(valid_config(name), **OTHERS.get(name, {}))
    arguments = list(inspect.signature(layer.forward).parameters.values())
    first = arguments[0].name if arguments else None
    if first not in ("x", "query"):  # as that of experts, or of a bias
        return
    others = [None for a in arguments[1:] if a.default is a.empty and a.kind < a.VAR_POSITIONAL]
    for wrong in (None, "x", [1.0]):
        with pytest.raises(TypeError, match=rf"^\w+: {first} must be a torch.Tensor, got"):
            layer(wrong, *others)


def test_every_config_checks_its_fields():
    for name in modules.__all__:
        config = getattr(getattr(modules, name), "Config", modules.base.layer.LayerConfig)
        assert issubclass(config, modules.base.layer.LayerConfig), name


@pytest.mark.parametrize("cache", [KVCache, RollingCache, PagePool])
def test_caches_hold_floating_point(cache):
    with pytest.raises(
        TypeError, match=f"{cache.__name__}: dtype must be .* got dtype=torch.int64"
    ):
        cache(1, 4, 1, 2, dtype=torch.int64)


#: Numbers that may be below 0, and what else is not nonsense for its field.
SENSIBLE = {"gate_bias", "lower_bound", "offset", "scale", "clamp_length", "theta"}
SENSIBLE |= {"log_atk_scale_init"}


def numeric_fields(config):
    for field in dataclasses.fields(config):
        kinds = set(str(getattr(field.type, "__name__", field.type)).split(" | "))
        if kinds & {"int", "float"} and kinds <= {"int", "float", "None"}:
            yield field.name, "float" in kinds


@pytest.mark.parametrize(
    ("config", "name", "is_float"),
    [
        pytest.param(config, *each, id=f"{type(config).__qualname__}-{each[0]}")
        for config in [*map(valid_config, LAYERS), *TRAINED.values()]
        for each in numeric_fields(config)
    ],
)
def test_no_number_may_be_nonsense(config, name, is_float):
    nonsense = [-1, -3, math.nan, math.inf, "2", [1], True, 1j, 10**400]
    if not is_float:
        nonsense += [0.5, 2.0]
    for value in nonsense:
        if name in SENSIBLE and value in (-1, -3):
            continue
        with pytest.raises((TypeError, ValueError), match=name):
            dataclasses.replace(config, **{name: value})


EVERY_PARAMETER = (
    modules.ALiBi.Config(4),
    modules.ALiBi.Config(4, trainable=True),
    Attention.Config(8, 2, bias=True, out_bias=True, qk_norm="l2", sinks=True, gate="headwise"),
    Attention.Config(8, 2, qk_norm="layer", head_scale=True),
    modules.CompressedSparseAttention.Config(8, 2, 4, 8, 4, 2, 4, index_heads=2, index_dim=8),
    modules.DeepSeekSparseAttention.Config(8, 2, 8, 8, 4, 4, 4, index_heads=2, index_dim=8),
    modules.DifferentialAttention.Config(8, 2, depth=0),
    modules.DifferentialAttention.Config(8, 2, depth=0, form="simple"),
    modules.DisentangledAttention.Config(8, 2, share_projections=False),
    modules.GatedAttentionUnit.Config(8, relative="t5"),
    modules.GatedAttentionUnit.Config(8),
    modules.LearnedPositional.Config(4, 8),
    MLP.Config(8, 16),
    MoE.Config.of(8, 16, 4, 2, bias=True, router_bias=True, shared_hidden_dim=8, shared_gate=True),
    MoE.Config.of(8, 16, 4, 2, router="sigmoid"),
    MoE.Config.of(8, 16, 4, 2, router="noisy"),
    MoE.Config.of(8, 16, 4, 2, router_grad="default_vector"),
    MultiheadAttention.Config(8, 2, add_bias_kv=True),
    MultiheadAttention.Config(8, 2, kdim=4, vdim=6),
    modules.LocalStridedAttention.Config(8, 2, out_bias=True),
    modules.MultiHeadLatentAttention.Config(8, 2, 8, 8, 4, 4, 4),
    modules.PatchMerging.Config(8),
    modules.RMSNormGated.Config(8),
    RotaryEmbedding.Config(8, scaling=reference.DynamicNTKScaling(2.0, 64), sticky=True),
    modules.SpatialReductionAttention.Config(8, 2, sr_ratio=2, bias=True),
    modules.T5RelativeBias.Config(2),
    modules.TransformerXLAttention.Config(8, 2),
    modules.WindowAttention.Config(8, 2, window=4),
)


@pytest.mark.parametrize("config", EVERY_PARAMETER, ids=lambda c: type(c).__qualname__[:-7])
def test_reset_parameters_fills_memory_that_held_anything(config):
    """FSDP calls reset_parameters after construction on the meta device."""
    with torch.device("meta"):
        layer = getattr(modules, type(config).__qualname__.split(".")[0])(config)
    layer.to_empty(device="cpu")
    held = [*layer.named_parameters(), *layer.named_buffers()]
    with torch.no_grad():
        for _, tensor in held:
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert held
    assert not [name for name, t in held if not (t == t).all() or (t == 99).any()]
