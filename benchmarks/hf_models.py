"""Measures time and memory of a training step of transformers' models, original and patched.

    python benchmarks/hf_models.py [--models llama mamba2] [--dtype bfloat16] [--rounds 5] [--quick]

Each model has random weights and small sizes. Original and patched run in separate processes, and
their steps (forward and backward) alternate, so that a slower machine affects both. Writes the rows
of this family of CPUs to benchmarks/results/hf_models.csv, and from all rows the table of
docs/hf_models.md; --quick only prints. Takes three minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Callable
from typing import Any

from report import RESULTS, ROOT, commit
from turns import serve, take_turns

from omniattn.ops.dispatch.cpu import cpu_family, cpuinfo
from omniattn.testing.table import replace_block

RECORD = RESULTS / "hf_models.csv"
PAGE = ROOT / "docs" / "hf_models.md"
WAYS = ("transformers", "omniattn")
BATCH, TOKENS = 2, 512
FIELDS = (
    *("family", "dtype", "model", "parameters", "transformers_ms", "omniattn_ms"),
    *("transformers_mib", "omniattn_mib", "cpu", "threads", "load", "torch", "transformers"),
    *("date", "commit"),
)
_SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
#: Name -> (class in transformers without "Config" and "ForCausalLM", sizes).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _SIZES),
    "Qwen3": ("Qwen3", _SIZES),
    "Gemma 2": ("Gemma2", {**_SIZES, "query_pre_attn_scalar": 32, "sliding_window": 256}),
    "Mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 8, "intermediate_size": 352}),
    "Qwen3-MoE": ("Qwen3Moe", {**_SIZES, **_EXPERTS}),
    "Mamba-2": (
        "Mamba2",
        {
            **{"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 16},
            **{"head_dim": 32, "n_groups": 1, "state_size": 64, "chunk_size": 64},
        },
    ),
    "Qwen3-Next": (
        "Qwen3Next",
        {
            **{**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 352},
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        },
    ),
}


def step_of(name: str, way: str, dtype: str) -> tuple[Callable[[], None], int]:
    """Returns a training step without an optimizer, and the number of parameters."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype)).train()
    if way == "omniattn":
        import omniattn.hf

        omniattn.hf.patch(model)
    tokens = torch.randint(sizes["vocab_size"], (BATCH, TOKENS))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return step, sum(p.numel() for p in model.parameters())


def measure(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Returns the row of a model."""
    commands = {way: ([__file__, "--worker", name, way, dtype], {}) for way in WAYS}
    found = take_turns(commands, rounds)
    row: dict[str, Any] = {"model": name, "dtype": dtype, "parameters": int(found[WAYS[0]].note)}
    for way, turns in found.items():
        row[f"{way}_ms"] = round(turns.seconds * 1e3, 1)
        row[f"{way}_mib"] = round(turns.mib)
    return row


def table(rows: list[dict[str, str]]) -> str:
    """Returns a section for each family of CPUs and dtype."""
    parts = []
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["family"], row["dtype"]) == (family, dtype)]
        first = own[0]
        parts.append(
            f"## {family}, {dtype}\n\n"
            f"{first['cpu']}, {first['threads']} threads, torch {first['torch']}, transformers "
            f"{first['transformers']}, {first['date']}, load average before it {first['load']}.\n\n"
            "| model | parameters | transformers | patched | speed-up | transformers | patched | "
            "memory |\n|---|---|---|---|---|---|---|---|"
        )
        for row in own:
            ms, mib = ([float(row[f"{way}_{unit}"]) for way in WAYS] for unit in ("ms", "mib"))
            parts[-1] += (
                f"\n| {row['model']} | {int(row['parameters']) / 1e6:.1f} M | {ms[0]:.0f} ms | "
                f"{ms[1]:.0f} ms | {ms[0] / ms[1]:.2f}x | {mib[0]:.0f} MiB | {mib[1]:.0f} MiB | "
                f"{mib[1] / mib[0]:.2f}x |"
            )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="print, write nothing")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(*step_of(*args.worker))
        return
    import torch
    import transformers

    machine = {
        "family": cpu_family(),
        "cpu": cpuinfo().get("model name", ""),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # from other processes, before the first step
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    rows = []
    for name in args.models:
        rows.append({**machine, **measure(name, args.dtype, args.rounds)})
        print(json.dumps(rows[-1]), flush=True)
    if args.quick:
        return
    measured = {(row["family"], row["dtype"], row["model"]) for row in rows}
    before = list(csv.DictReader(RECORD.open())) if RECORD.exists() else []
    kept = [row for row in before if (row["family"], row["dtype"], row["model"]) not in measured]
    order = list(MODELS)
    every = sorted([*kept, *rows], key=lambda r: (r["family"], r["dtype"], order.index(r["model"])))
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(every)
    with RECORD.open() as file:
        written = table(list(csv.DictReader(file)))
    PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), "hf models", written))


if __name__ == "__main__":
    main()
