"""Checks that a block packaged by AOTInductor equals the module, and times both.

    python benchmarks/aot_inductor.py

Compiles C++ for half a minute, too long for a test.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.export import Dim

from omniattn.modules import Attention, GatedMLP, Residual, RMSNorm
from omniattn.testing.timing import time_call


@torch.no_grad()
def main() -> None:
    """Prints both times; raises if the results differ."""
    layers = (
        Attention(Attention.Config(64, 4, 2, window_size=(7, -1), sinks=True)),
        Attention(Attention.Config(64, 4, causal=False)),  # no mask, no score, no side tensor
        GatedMLP(GatedMLP.Config(64, 128)),
    )
    pre_norm = Residual.Config(RMSNorm.Config(64))
    block = torch.nn.Sequential(*(Residual(layer, pre_norm) for layer in layers)).eval()
    sizes = ({0: Dim("batch", max=64), 1: Dim("tokens", max=4096)},)
    program = torch.export.export(block, (torch.randn(2, 33, 64),), dynamic_shapes=sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder) / "block.pt2")
        )
        packaged = torch._inductor.aoti_load_package(path)
    for shape in ((2, 33, 64), (5, 100, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(packaged(x), block(x))
        times = [time_call(lambda f=f, x=x: f(x)) * 1e6 for f in (packaged, block)]
        print(f"{shape}: packaged {times[0]:.0f} us, module {times[1]:.0f} us")


if __name__ == "__main__":
    main()
