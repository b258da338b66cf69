"""Prints a digest of the results and gradients of each op that multiplies a dtype in tiles."""

import hashlib
import sys

import torch

from omniattn.testing import registry
from omniattn.testing.properties import outputs_and_gradients

OPS = (
    *("attention", "attention_varlen", "selected_attention", "moe_experts", "linear", "glu_mlp"),
    *("attention_weights", "select_attention", "gated_delta_rule", "ssd"),
)


def main() -> None:
    torch.set_num_threads(1)
    for name in OPS:
        spec = registry()[name]
        for case in spec.cases:
            digest = hashlib.sha256()
            for result in outputs_and_gradients(spec, case, getattr(torch, sys.argv[1])):
                # NaN by NaN: which payload survives is the one difference.
                digest.update(torch.nan_to_num(result.detach().double()).numpy().tobytes())
            print(name, case.name, digest.hexdigest())


if __name__ == "__main__":
    main()
