"""omniattn.h: ops with gradients from C++ alone, equal to those called from Python."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omniattn import functional as F
from omniattn.ops.dispatch import library

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "csrc/cpp"


def build(name: str, folder: Path) -> Path:
    """Builds a program as docs/cpp.md says."""
    defines = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", f"-DOMNIATTN={HEADERS}"]
    cmake = [
        "cmake",
        "-S",
        HERE,
        "-B",
        folder,
        *defines,
        "-DCMAKE_CXX_FLAGS=-O0 -Wall -Wextra -Werror",
    ]
    subprocess.run(cmake, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "--target", name], check=True)
    return folder / name


def kernels() -> str:
    return str(library.loaded["cpu"])


def test_a_block_trains(tmp_path):
    run = [build("train", tmp_path), kernels()]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", lines)]
    assert len(losses) == 3
    assert losses[0] > 3.0 and losses[-1] < 1e-3


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def inputs(dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(5), torch.arange(1, 5)).double()

    def r(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype)

    heads = {"q": r(2, 5, 2, 8), "k": r(2, 5, 2, 8), "v": r(2, 5, 2, 6)}
    grouped = {"q": r(2, 5, 4, 8), "k": r(2, 7, 2, 8), "v": r(2, 7, 2, 6)}
    wide = torch.promote_types(dtype, torch.float32)
    g, beta = -torch.rand(2, 5, 2).to(wide), torch.rand(2, 5, 2).to(wide)
    delta = {**heads, "g": g, "beta": beta, "initial_state": torch.randn(2, 2, 8, 6).to(wide)}
    scan = {"u": r(2, 5, 3), "delta": r(2, 5, 3), "A": -torch.rand(3, 4).to(wide)}
    scan |= {"B": r(2, 5, 4), "C": r(2, 5, 4), "D": torch.randn(3).to(wide), "z": r(2, 5, 3)}
    scan |= {"delta_bias": torch.randn(3).to(wide)}
    return {
        "linear": {"x": r(2, 3, 4), "weight": r(5, 4), "bias": r(5)},
        "linear_without_bias": {"x": r(2, 3, 4), "weight": r(5, 4)},
        "relu_squared": {"gate": r(2, 3, 4), "up": r(2, 3, 4)},
        "rms_norm": {"x": r(2, 3, 4), "weight": r(4)},
        "layer_norm": {"x": r(2, 3, 4), "weight": r(4), "bias": r(4)},
        "swiglu": {"gate": r(2, 3, 4), "up": r(2, 3, 4)},
        "attention": grouped,
        "window": grouped,
        "lse": grouped,
        "rotary": {"q": heads["q"], "cos": angles.cos().to(wide), "sin": angles.sin().to(wide)},
        "gated_linear_attention": {**heads, "g": g},
        "gated_delta_rule": delta,
        "state": delta,
        "causal_conv1d": {"x": r(2, 5, 3), "weight": r(3, 4), "bias": r(3)},
        "selective_scan": scan,
        "cross_entropy": {"logits": r(6, 5), "target": torch.tensor([0, 4, -100, 2, 1, 3])},
    }


FUNCTIONS = {
    "linear": lambda **t: F.linear(**t, backend="cpu"),
    "linear_without_bias": lambda **t: F.linear(**t, backend="cpu"),
    "relu_squared": lambda gate, up: torch.ops.omniattn.glu(gate, up, 7, []),
    "rms_norm": F.rms_norm,
    "layer_norm": F.layer_norm,
    "swiglu": F.swiglu,
    "attention": lambda **t: F.attention(**t, causal=True),
    "window": lambda **t: F.attention(**t, window_size=(2, 1), scale=0.3),
    "lse": lambda **t: F.attention(**t, return_lse=True)[1],
    "rotary": lambda q, cos, sin: F.apply_rotary(q, None, cos, sin)[0],
    "gated_linear_attention": lambda **t: F.gated_linear_attention(**t)[0],
    "gated_delta_rule": lambda **t: F.gated_delta_rule(**t)[0],
    "state": lambda **t: F.gated_delta_rule(**t)[1],
    "causal_conv1d": lambda **t: F.causal_conv1d(**t, activation="silu"),
    "selective_scan": lambda **t: F.selective_scan(**t, delta_softplus=True)[0],
    "cross_entropy": F.cross_entropy,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("parity", tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_those_of_python(program, dtype, tmp_path):
    given = inputs(dtype)
    assert given.keys() == FUNCTIONS.keys()
    torch.save(given, tmp_path / "in.pt")
    subprocess.run([program, kernels(), tmp_path / "in.pt", tmp_path / "out.pt"], check=True)
    found = torch.load(tmp_path / "out.pt", weights_only=False)  # written by C++
    for name, tensors in given.items():
        fixed = {"cos", "sin", "target"}
        leaves = {n: t.clone().requires_grad_(n not in fixed) for n, t in tensors.items()}
        y = FUNCTIONS[name](**leaves)
        (y.square().sum() / 2).backward()
        expected = {name: y}
        expected |= {f"{name} {n}": t.grad for n, t in leaves.items() if n not in fixed}
        for key, t in expected.items():
            if dtype == torch.bfloat16:  # measurements choose its instruction sets, in Python alone
                atol = 2**-7 * t.abs().max().item()
                torch.testing.assert_close(found[key], t, rtol=0, atol=atol)
            else:
                assert torch.equal(found[key], t), key


def test_errors_name_the_argument(program):
    run = subprocess.run([program, kernels()], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        "omniattn::call: x of norm is an undefined tensor",
        "omniattn::call: weight of linear is an undefined tensor",
        "omniattn::call: norm takes 7 arguments, got 1",
        "omniattn::call: there is no op nothing_raw: load its library by omniattn::load, or call "
        "it through the dispatcher",
    ]
