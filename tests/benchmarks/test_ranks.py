"""benchmarks/processes/ranks.py: two processes against one, and their timeline."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_processes(tmp_path):
    figure = tmp_path / "timeline.png"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", ROOT / "benchmarks" / "processes" / "ranks.py"]
    done = subprocess.run(
        [*torchrun, *script, "--tokens", "256", "--repeats", "1", "--out", figure],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    for form in ("ring attention", "gated linear attention"):
        row = re.search(rf"^form {form}  tokens 256 .*  share (\S+)  work (\S+)", done.stdout, re.M)
        assert float(row[1]) > 0.5 and float(row[2]) > 0.5
    assert figure.read_bytes().startswith(b"\x89PNG")
