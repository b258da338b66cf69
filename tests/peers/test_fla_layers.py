"""fla's own layers, whose ops and modules are ours, against our layers with their weights."""

import inspect
from typing import Any

import peer_packages
import pytest
import torch

from omniattn import compat
from omniattn.compat import fla

pytestmark = [pytest.mark.slow, peer_packages.require("fla", "layers/gla.py", "layers/comba.py")]
B, T, D = 2, 70, 32
HEADS = {"hidden_size": D, "num_heads": 2, "head_dim": 8}
#: File in fla/layers, class, options, and further tensors of a call.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("comba", "Comba", HEADS | {"expand_v": 1.5, "correction_factor": 0.3}),
    ("comba", "Comba", HEADS | {"use_inner_decay": False, "use_output_gate": False}),
    ("comba", "Comba", HEADS | {"use_output_correction": False, "use_short_conv": False}),
    ("gated_deltaproduct", "GatedDeltaProduct", HEADS | {"num_v_heads": 4}),
    (
        "gated_deltaproduct",
        "GatedDeltaProduct",
        HEADS | {"use_forget_gate": False, "num_householder": 3, "allow_neg_eigval": False},
    ),
    ("gdn2", "GatedDeltaNet2", HEADS | {"num_v_heads": 4, "allow_neg_eigval": True}),
]


@pytest.fixture(autouse=True)
def installed():
    """Their imports of ops and modules find ours."""
    pytest.importorskip("einops")
    compat.install("fla", "flash_attn")
    yield
    compat.uninstall()


def with_all_parameters(layer: torch.nn.Module) -> torch.nn.Module:
    """Gives every parameter values of which each matters, in place of zeros and ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join((case[1], *map(str, case[2].values())))
)
def test_layer(case):
    file, name, options = case
    cls = getattr(peer_packages.load("fla", f"layers/{file}.py"), name)
    mine = getattr(fla, name)
    kept = inspect.signature(cls).parameters.keys() - {"kwargs"}
    assert kept == inspect.signature(mine).parameters.keys()
    for key, parameter in inspect.signature(mine).parameters.items():
        assert parameter.default == inspect.signature(cls).parameters[key].default, key
    theirs = with_all_parameters(cls(**options))
    ours = mine(**options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, T, D)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    boundaries = torch.tensor([0, 30, 31, B * T], dtype=torch.int32)
    rows = x.flatten(0, 1)[None]
    packed = (layer(rows, cu_seqlens=boundaries)[0] for layer in (ours, theirs))
    torch.testing.assert_close(*packed, rtol=1e-4, atol=1e-5)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, :9] = 0
    padded = (layer(x, attention_mask=mask)[0] for layer in (ours, theirs))
    torch.testing.assert_close(*padded, rtol=1e-4, atol=1e-5)
