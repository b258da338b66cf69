"""fla's own layers, whose ops and modules are ours, against our layers with their weights."""

import importlib
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import peer_packages
import peers
import pytest
import torch

from omniattn import compat
from omniattn.compat import fla

pytestmark = [pytest.mark.slow, peer_packages.require("fla", "layers/gla.py", "layers/comba.py")]
B, T, D = 2, 70, 32
SIZES = {"hidden_size": D, "layer_idx": 0}
HEADS = SIZES | {"num_heads": 2, "head_dim": 8}
RWKV7 = SIZES | {"head_dim": 8, "num_hidden_layers": 3}
STEPS = {"mode": "fused_recurrent"}  # the only one with packed sequences
GROUPS = SIZES | {"num_heads": 4, "num_kv_heads": 2}
NSA = {"head_dim": 8, "block_size": 4, "block_counts": 4, "window_size": 7}
MLA = {"num_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6}
MLA |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": None}
LOWER = {"lower_bound": torch.linspace(0.1, 0.6, D)}
FIRST = {"v_first": torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))}
Options = dict[str, Any]
#: File in fla/layers, class, options, and further tensors of a call.
CASES: list[tuple[str, str, Options, Options]] = [
    ("comba", "Comba", HEADS | {"expand_v": 1.5, "correction_factor": 0.3}, {}),
    ("comba", "Comba", HEADS | {"use_inner_decay": False, "use_output_gate": False}, {}),
    ("comba", "Comba", HEADS | {"use_output_correction": False, "use_short_conv": False}, {}),
    ("gated_deltaproduct", "GatedDeltaProduct", HEADS | {"num_v_heads": 4}, {}),
    (
        "gated_deltaproduct",
        "GatedDeltaProduct",
        HEADS | {"use_forget_gate": False, "num_householder": 3, "allow_neg_eigval": False},
        {},
    ),
    ("gdn2", "GatedDeltaNet2", HEADS | {"num_v_heads": 4, "allow_neg_eigval": True}, {}),
    ("hgrn", "HGRNAttention", SIZES | STEPS | {"expand_ratio": 2}, {}),
    ("hgrn", "HGRNAttention", SIZES | STEPS | {"layer_idx": 1, "use_short_conv": True}, LOWER),
    ("rwkv6", "RWKV6Attention", SIZES | {"num_heads": 2, "proj_low_rank_dim": 4}, {}),
    ("rwkv7", "RWKV7Attention", RWKV7 | {"value_dim": 64}, {}),
    ("rwkv7", "RWKV7Attention", RWKV7 | {"layer_idx": 2, "fuse_norm": True}, FIRST),
    ("forgetting_attn", "ForgettingAttention", GROUPS | {"use_output_gate": True}, {}),
    ("forgetting_attn", "ForgettingAttention", GROUPS | {"qk_norm": True, "qkv_bias": True}, {}),
    ("wall_attn", "WallAttention", GROUPS | {"qk_norm": True, "use_output_gate": True}, {}),
    ("wall_attn", "WallAttention", GROUPS | {"use_scalar_gate": True, "qkv_bias": True}, {}),
    ("path_attn", "PaTHAttention", GROUPS | {"use_forget_gate": True, "use_qk_norm": True}, {}),
    ("path_attn", "PaTHAttention", GROUPS | {"use_low_rank_w": False, "conv_bias": True}, {}),
    ("path_attn", "PaTHAttention", GROUPS | {"use_w_shortconv": False}, {}),
    ("deltaformer", "DeltaFormerAttention", SIZES | {"num_heads": 4, "qk_norm": True}, {}),
    ("nsa", "NativeSparseAttention", GROUPS | NSA, {}),
    ("nsa", "NativeSparseAttention", GROUPS | NSA | {"window_size": 0, "qkv_bias": True}, {}),
    ("moba", "MoBA", GROUPS | {"moba_chunk_size": 8, "moba_topk": 3, "qk_norm": True}, {}),
    ("moba", "MoBA", GROUPS | {"moba_chunk_size": 8, "use_output_gate": True}, {}),
    ("moba", "MoBA", GROUPS | {"moba_topk": 1}, {}),
    ("mla", "MultiheadLatentAttention", SIZES | MLA, {"attention_mask": None}),
    (
        "mla",
        "MultiheadLatentAttention",
        SIZES | MLA | {"q_lora_rank": None, "window_size": 9},
        {"attention_mask": None},
    ),
]
#: Layers whose parallel form runs on a CPU in fla, and no other.
STATE_SPACE: list[tuple[str, str, Options]] = [
    ("mamba", "Mamba", {"hidden_size": D, "intermediate_size": 24, "state_size": 3}),
    # One group: with more, their CPU path reads other groups than their kernel.
    ("mamba2", "Mamba2", {"hidden_size": D, "head_dim": 8, "state_size": 4, "use_bias": True}),
]
#: Layers whose steps with a cache differ from the parallel form, and those that need a mask, have
#: no cache or have kernels of their own for it in fla.
OTHER_STEPS = ("MoBA",)
NO_STEPS = ("PaTHAttention", "DeltaFormerAttention", "WallAttention")
WITHOUT_CACHE: list[tuple[str, str, Options]] = [
    ("based", "BasedLinearAttention", {"feature_dim": 8, "mode": "parallel"}),
    ("based", "BasedLinearAttention", {"feature_dim": 8, "mode": "chunk"}),
    ("rebased", "ReBasedLinearAttention", {"feature_dim": 6, "mode": "parallel"}),
    ("rebased", "ReBasedLinearAttention", {"feature_dim": 6, "mode": "chunk"}),
    (
        "rebased",
        "ReBasedLinearAttention",
        {"feature_dim": 6, "use_beta": False, "use_gamma": False},
    ),
    ("rebased", "ReBasedLinearAttention", {"feature_dim": 6, "normalize": False}),
]

#: Steps of their kernels of RWKV-7, which are no public names.
PARTS = {
    "fused_addcmul": {
        "fused_addcmul_rwkv7": lambda x, delta, *mus: tuple(x + delta * mu for mu in mus)
    },
    "fused_k_update": {"fused_k_rwkv7": lambda k, a, k_a: k + k * (a - 1) * k_a},
    "gate_output_correction": {
        "gate_output_correction": lambda o, r, k, r_k, v, g: (
            (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g
        )
    },
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Their imports of ops and modules find ours."""
    with monkeypatch.context() as path:
        path.syspath_prepend(str(Path(peers.FOLDER or "missing", "site")))
        pytest.importorskip("einops")
    compat.install("fla", "flash_attn", "causal_conv1d", "mamba_ssm")
    for name, functions in PARTS.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"fla.ops.rwkv7.{name}", module)
    decoding = ModuleType("decoding")
    decoding.attn_decoding_one_step = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.attn.decoding", decoding)
    constant = ModuleType("constant")
    constant.RCP_LN2 = 1 / math.log(2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.utils.constant", constant)
    for name in ("build_wall_kv_cache", "parallel_wall_attn_decode"):  # of steps with a cache
        wall = importlib.import_module("fla.ops.wall_attn")
        monkeypatch.setattr(wall, name, None, raising=False)
    for name in ("rwkv6", "mamba2"):  # whose parts other layers import
        layers = peer_packages.load("fla", f"layers/{name}.py")
        monkeypatch.setitem(sys.modules, f"fla.layers.{name}", layers)
    yield
    compat.uninstall()


def with_all_parameters(layer: torch.nn.Module) -> torch.nn.Module:
    """Gives every parameter values of which each matters, in place of zeros and ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.eval()


def compare(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def pair_of(file: str, name: str, options: Options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our layer and theirs with the same weights, after a comparison of their arguments."""
    cls = getattr(peer_packages.load("fla", f"layers/{file}.py"), name)
    mine = getattr(fla, name)
    known = inspect.signature(cls).parameters
    for key, parameter in inspect.signature(mine).parameters.items():
        assert parameter.default == known[key].default, key
    assert known.keys() - {"kwargs"} == inspect.signature(mine).parameters.keys()
    theirs = with_all_parameters(cls(**options))
    ours = mine(**options).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def case_name(case: tuple[Any, ...]) -> str:
    return "-".join((case[1], *map(str, case[2].values())))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", WITHOUT_CACHE, ids=case_name)
def test_layer_without_a_cache(case):
    file, name, options = case
    heads = {"num_heads": 4, "num_key_value_heads": 4}
    ours, theirs = pair_of(file, name, {"hidden_size": D, **heads, **options})
    x = torch.randn(B, T, D)
    compare(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", STATE_SPACE, ids=case_name)
def test_state_space_layer(case):
    ours, theirs = pair_of(*case)
    x = torch.randn(B, T, D)
    compare(ours(x)[0], theirs(x)[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_layer(case):
    file, name, options, more = case
    ours, theirs = pair_of(file, name, options)
    torch.manual_seed(2)
    x = torch.randn(B, T, D)
    whole = theirs(x, **more)[0]
    compare(ours(x, **more)[0], whole)
    boundaries = torch.tensor([0, 30, 31, B * T], dtype=torch.int32)
    flat = {k: v.flatten(0, 1)[None] if k == "v_first" else v for k, v in more.items()}
    rows = x.flatten(0, 1)[None]
    packed = (layer(rows, cu_seqlens=boundaries, **flat)[0] for layer in (ours, theirs))
    compare(*packed)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :9] = 0
    given = {**more, "attention_mask": mask}
    padded = []
    for layer in (ours, theirs):
        cache = {"past_key_values": fla.FLACache()} if name == "PaTHAttention" else {}
        padded.append(layer(x, **given, **cache)[0])
    if "use_qk_norm" not in options:  # which fla leaves out with a mask
        compare(*(y[mask.bool()] for y in padded))
    caches = fla.FLACache(), fla.FLACache()
    for part in (slice(0, 66), slice(66, 67), slice(67, 70)):
        rest = {k: v[:, part] if k == "v_first" else v for k, v in more.items()}
        rest["use_cache"] = True
        y = ours(x[:, part], past_key_values=caches[0], **rest)[0]
        if name not in OTHER_STEPS:
            compare(y, whole[:, part])
        if name not in NO_STEPS:
            compare(y, theirs(x[:, part], past_key_values=caches[1], **rest)[0])
    if name not in NO_STEPS:
        compare(caches[0][options["layer_idx"]], caches[1][options["layer_idx"]])
