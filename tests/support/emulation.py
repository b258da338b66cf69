"""Software forms of the levels that few machines have, and a mark for tests that need them."""

import os

import pytest

from omniattn import _kernels as kernels
from omniattn import testing


def software(level):
    """Returns the software forms of a level with tiles that run here: on avx512 and on avx2."""
    names = f"{level}_emulated", f"{level}_portable"
    return [isa for isa in kernels.probe_isas() if isa in names]


SOFTWARE = software("amx_bf16")

#: For tests of these forms. A job that promises them (.ci/run) fails without; others skip.
needs_software = pytest.mark.skipif(
    not SOFTWARE and os.environ.get("OMNIATTN_REQUIRE_EMULATION") != "1",
    reason="software tiles need AVX2 and a build with OMNIATTN_BUILD_ALL=ON, OMNIATTN_LEVELS=all",
)

#: The library whose products are emulated on this machine, and the levels that it emulates here.
TILES = ("amx_bf16", "amx_fp16")
LIBRARY, LEVELS = (
    ("libomniattn_amx_emulated.so", ("avx512_bf16", *TILES))
    if "avx512" in testing.isas()
    else ("libomniattn_amx_portable.so", TILES)
)
