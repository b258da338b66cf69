"""fla's own layers, whose ops and modules are ours, against our layers with their weights."""

import inspect
import sys
from types import ModuleType
from typing import Any

import peer_packages
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
    pytest.importorskip("einops")
    compat.install("fla", "flash_attn")
    for name, functions in PARTS.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"fla.ops.rwkv7.{name}", module)
    rwkv6 = peer_packages.load("fla", "layers/rwkv6.py")
    monkeypatch.setitem(sys.modules, "fla.layers.rwkv6", rwkv6)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join((case[1], *map(str, case[2].values())))
)
def test_layer(case):
    file, name, options, more = case
    cls = getattr(peer_packages.load("fla", f"layers/{file}.py"), name)
    mine = getattr(fla, name)
    known = inspect.signature(cls).parameters
    for key, parameter in inspect.signature(mine).parameters.items():
        assert parameter.default == known[key].default, key
    assert known.keys() - {"kwargs"} == inspect.signature(mine).parameters.keys()
    theirs = with_all_parameters(cls(**options))
    ours = mine(**options).eval()
    ours.load_state_dict(theirs.state_dict())
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
    padded = (layer(x, attention_mask=mask, **more)[0] for layer in (ours, theirs))
    compare(*(y[mask.bool()] for y in padded))
    caches = fla.FLACache(), fla.FLACache()
    for part in (slice(0, 66), slice(66, 67), slice(67, 70)):
        rest = {k: v[:, part] if k == "v_first" else v for k, v in more.items()}
        for layer, cache in zip((ours, theirs), caches, strict=True):
            y = layer(x[:, part], past_key_values=cache, use_cache=True, **rest)[0]
            compare(y, whole[:, part])
    compare(caches[0][options["layer_idx"]], caches[1][options["layer_idx"]])
