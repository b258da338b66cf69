"""Computes digests of outputs and gradients of all OpSpec cases, to compare two revisions.

    PYTHONPATH=OLD/python OMNIATTN_LIBRARY_DIR=... python tools/bits.py --write old.json
    python tools/bits.py --against old.json

Inputs depend only on the name of a case, so equal digests mean equal bits. Lists cases that only
one revision has. Exits with 1 if a digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from omniattn import testing


def digest(tensors: tuple[Tensor, ...]) -> str:
    """Returns the digest of shapes, dtypes and bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def digests(pattern: str) -> dict[str, str]:
    """Returns the digests of all cases and dtypes whose label matches the pattern."""
    found = {}
    cases = [
        (spec, case, dtype, label)
        for spec in testing.registry().values()
        for case in spec.cases
        for dtype in spec.dtypes
        if re.search(pattern, label := f"{spec.name}-{case.name}-{str(dtype)[6:]}")
    ]
    for spec, case, dtype, label in tqdm(cases, unit="case", disable=None):
        call = spec.call(case, dtype)
        found[label] = digest(call.run(spec.function) + call.gradients(spec.function))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="file for the digests")
    parser.add_argument("--against", type=Path, help="file of another revision's digests")
    parser.add_argument("--level", default=None, help="ISA level (default: the best)")
    parser.add_argument("--only", default="", help="pattern of the labels to run")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with testing.isa(args.level or testing.isas()[-1]):
        found = digests(args.only)
    print(f"{len(found)} digests")
    if args.write:
        args.write.write_text(json.dumps(found, indent=0, sort_keys=True))
    if args.against:
        before = json.loads(args.against.read_text())
        both = found.keys() & before.keys()
        different = sorted(name for name in both if found[name] != before[name])
        for name in different:
            print("differs:", name)
        for name in sorted(found.keys() ^ before.keys()):
            print("only", "here:" if name in found else "there:", name)
        print(f"{len(both) - len(different)} equal, {len(different)} differ")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
