"""`import omniattn` is enough for all subpackages, and loads only what it needs."""

import os
import subprocess
import sys

import pytest

import omniattn
from omniattn import config, testing
from omniattn.ops.dispatch import library as _library

LAZY = ("hf", "models", "modules", "training")


def run(program: str) -> None:
    """In a process of its own: this one has imported everything."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_subpackages_are_imported_at_their_first_use():
    run(
        "import sys, omniattn\n"
        f"for name in {LAZY}:\n"
        "    assert name in dir(omniattn) and f'omniattn.{name}' not in sys.modules, name\n"
        "assert 'transformers' not in sys.modules\n"
        "assert omniattn.modules.RMSNorm is sys.modules['omniattn.modules'].RMSNorm\n"
        "assert 'llama' in omniattn.models.PRESETS\n"
    )


def test_torch_compile_is_loaded_by_those_who_use_it():
    """torch.compile's modules take as long to load as torch."""
    run(
        "import sys, torch, omniattn, omniattn.modules, omniattn.models\n"
        "from omniattn import functional as F\n"
        "q = torch.ones(1, 2, 1, 8, requires_grad=True)\n"
        "F.attention(q, q, q, score_mod=lambda s, b, h, q, k: s + k).sum().backward()\n"
        "F.linear(F.rms_norm(q), torch.ones(2, 8)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )


def test_the_first_call_of_a_process_may_be_compiled():
    """Nothing that the first call alone computes may break the graph, such as the lock which a
    cached property takes before Python 3.12, on machines with a record of `linear` and without."""
    run(
        "import torch\n"
        "from omniattn.modules import Attention, GatedMLP\n"
        "from omniattn.ops.dispatch import gemm_choice\n"
        "x = torch.ones(1, 2, 8)\n"
        "def compiled(layer):\n"
        "    y = torch.compile(layer, fullgraph=True, backend='eager')(x)\n"
        "    torch.testing.assert_close(y, layer(x))\n"
        "compiled(Attention(8, 2))\n"
        "crossings = gemm_choice.Crossings(9, 99, (1, 0), 'test')\n"
        "gemm_choice.CHOICE[torch.float32] = crossings\n"
        "compiled(GatedMLP(8, 16))\n"
    )


def test_hf_without_transformers_names_the_extra():
    run(
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import omniattn\n"
        "assert not hasattr(omniattn, 'hf')\n"
        "from omniattn import *\n"
        "help(omniattn)\n"
        "for program in ('omniattn.hf', 'import omniattn.hf', 'from omniattn import hf'):\n"
        "    try:\n"
        "        exec(program)\n"
        "    except (AttributeError, ImportError) as error:\n"
        "        assert \"pip install 'omniattn[hf]'\" in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(program)\n"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'omniattn' has no attribute 'module'"):
        _ = omniattn.module


def level(cap: str | None) -> str:
    """The number of the level that a process under OMNIATTN_CPU_ISA uses, or its error."""
    env = {name: value for name, value in os.environ.items() if name != "OMNIATTN_CPU_ISA"}
    env |= {} if cap is None else {"OMNIATTN_CPU_ISA": cap}
    program = "import omniattn, torch; print(torch.ops.omniattn.cpu_isa())"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    return result.stdout.strip() or result.stderr


def test_cap_on_the_instruction_set_is_read_from_the_environment():
    lowest = testing.isas()[0]
    assert level(lowest) == str(config.CPU_ISAS.index(lowest))
    assert level(None) == level("")
    assert "OMNIATTN_CPU_ISA must be one of" in level("sse9")


def test_a_level_that_was_not_built_is_refused():
    built = _library.built_isas()
    for name in set(config.CPU_ISAS).difference(built):
        message = f"no kernels for OMNIATTN_CPU_ISA='{name}', only for {', '.join(built)}; pip"
        assert message in level(name)
