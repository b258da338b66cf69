"""Arguments of the commands, without torch; each function's docstring is its help text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

from omniattn.suggestions import did_you_mean

#: Family -> names of the models of `train --model`; each is a preset of omniattn.models.
FAMILIES: dict[str, tuple[str, ...]] = {
    "softmax attention": (
        *("llama", "llama-tiny", "llama-medium", "falcon", "gpt2", "mla", "differential"),
        *("select", "selective", "deltaformer", "forgetting", "stick-breaking", "softpick"),
        *("path", "wall", "ssmax", "parallax", "mta", "mfa", "tpa", "mlra"),
        *("resformer", "yoco", "hyper", "mhc", "attnres", "canon", "engram"),
    ),
    "mixtures of experts": ("mixtral", "switch", "llama4", "deepseek-moe", "deepseek-moe-mtp"),
    "sparse attention": (
        *("longformer", "bigbird", "hub-spoke", "detsa", "dual-chunk", "local-strided", "nsa"),
        *("moba", "dsa", "csa", "hca", "routed-blocks"),
    ),
    "linear attention and delta rules": (
        *("linear", "delta-attention", "performer", "gla", "retnet", "deltanet", "gated-deltanet"),
        *("gated-deltaproduct", "gated-deltanet2", "mom", "comba", "hgrn", "rodimus", "hgrn2"),
        *("lightning", "lightnet", "based", "rebased", "kda", "gsa", "raven", "abc"),
        *("precond-gated-deltanet", "precond-kda", "mesanet", "cyfa", "gated-kalmanet", "ttt"),
        *("titans", "titans-mlp", "atlas"),
    ),
    "RWKV and xLSTM": ("rwkv4", "rwkv5", "rwkv6", "rwkv7", "xlstm", "xlstm-large"),
    "state-space models": ("s4d", "mamba", "longhorn", "mamba2", "log-linear-mamba2", "mamba3"),
    "hybrids": ("jamba", "samba", "zamba2", "kimi-linear"),
    "encoders and encoder-decoders": ("bert", "electra", "deberta", "t5", "transformer"),
    "vision": ("vit", "swin", "deit", "mae", "clip", "dino"),
}

#: Names of `compare --models`: mixers of omniattn.compare.KINDS.
COMPARED: dict[str, tuple[str, ...]] = {
    "softmax attention": (
        *("llama", "mqa", "mla", "differential", "select", "selective", "deltaformer"),
        *("forgetting", "stick-breaking", "softpick", "path", "wall", "ssmax", "tpa", "mlra"),
        *("resformer", "yoco", "hyper", "mhc", "attnres", "canon"),
        *("parallax", "mta", "engram", "mfa"),
    ),
    "sparse attention": (
        *("window", "longformer", "bigbird", "hub-spoke", "detsa", "dual-chunk", "local-strided"),
        *("nsa", "moba", "csa", "hca", "routed-blocks"),
    ),
    "linear attention and delta rules": (
        *("linear", "delta-attention", "performer", "gla", "retnet", "deltanet", "gated-deltanet"),
        *("gated-deltaproduct", "gated-deltanet2", "mom", "comba", "hgrn", "rodimus", "hgrn2"),
        *("lightning", "lightnet", "based", "rebased", "kda", "gsa", "raven", "abc"),
        *("precond-gated-deltanet", "precond-kda", "mesanet", "cyfa", "gated-kalmanet", "ttt"),
        *("titans", "titans-mlp", "atlas"),
    ),
    "RWKV and xLSTM": ("rwkv4", "rwkv5", "rwkv6", "rwkv7", "mlstm", "slstm"),
    "state-space models": (
        "s4",
        "s4d",
        "mamba",
        "longhorn",
        "mamba2",
        "log-linear-mamba2",
        "mamba3",
    ),
    "torch.nn": ("rnn", "lstm", "gru"),
}
#: Names of `train --pp-schedule`: schedules of omniattn.training.
PIPELINE_SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")
#: Seconds that a process of `train` waits for another one.
TIMEOUT = 600
#: Names of `compare --parts` and `--tasks`.
PARTS = ("loss", "decode", "recall", "positions", "norms")
TASKS = ("needle", "associative recall", "multi-hop", "selective copy")


def train(parser: argparse.ArgumentParser) -> None:
    """Train a small model, by default a byte-level decoder on Python's standard library.

    The output folder gets checkpoint.safetensors (weights and training state), loss.png,
    sample.txt if the model generates text, and load.png if it has experts. Ctrl-C saves and stops.
    --resume continues bit for bit; with more --steps it goes beyond the end, at the final learning
    rate. It uses the data path of the run unless --data gives a new one. Afterwards the first steps
    are repeated with the plain-torch reference of every op, to compare the losses and, if both runs
    were long enough to measure, the speed.

    With --pp, --dp, --fsdp, --cp, --ep and --tp, decoders train on several processes, with the
    losses of one: torchrun --nproc-per-node 4 -m omniattn train --dp 2 --tp 2
    """
    add = parser.add_argument
    add("--data", type=_path, metavar="PATH", help="text file, or folder of text files")
    add("--model", metavar="NAME", type=_model, help="model, see below (default: llama)")
    add(
        "--config",
        type=_reference,
        metavar="FILE.py:NAME",
        help="TrainConfig or model config in a Python file, which is executed; other options "
        "override its fields (with --resume, only its model is used)",
    )
    add(
        "--task",
        choices=["instructions"],
        help="learn answers: --data FILE.jsonl has texts prompt and answer in each line",
    )
    add("--steps", type=_positive, help="optimizer steps (default: 200)")
    add("--batch", type=_positive, help="examples per step (default: 8)")
    add("--length", type=_positive, help="tokens per example of text (default: 256)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32")
    add("--accumulate", type=_positive, help="parts of a batch, one after another (default: 1)")
    add("--recompute", action="store_true", default=None, help="save memory, recompute blocks")
    add("--seed", type=_seed, help="seed of weights, data order and sample (default: 0)")
    add(
        "--augment",
        type=lambda text: tuple(text.split(",")),
        metavar="NAMES",
        help="mixup,cutmix,randaugment: augmentations by torchvision, for vit and swin",
    )
    add(
        "--pp",
        type=_positive,
        default=1,
        metavar="N",
        help="divide layers among N processes, for a pipeline of the parts of --accumulate",
    )
    add(
        "--pp-schedule",
        choices=PIPELINE_SCHEDULES,
        help="order of the parts in the pipeline (default: Interleaved1F1B with several stages "
        "on a process, else 1F1B, or GPipe with fewer parts than processes)",
    )
    add(
        "--stages-per-rank",
        type=_positive,
        default=1,
        metavar="N",
        help="stages of the pipeline on each process (default: 1)",
    )
    add("--dp", type=_positive, default=1, metavar="N", help="divide batches among N processes")
    add(
        "--fsdp",
        type=_positive,
        default=1,
        metavar="N",
        help="divide batches among N processes and parameters among these only, not those of --dp",
    )
    add("--cp", type=_positive, default=1, metavar="N", help="divide tokens among N processes")
    add(
        "--ep",
        type=_positive,
        default=1,
        metavar="N",
        help="divide batches and experts among N processes",
    )
    add("--tp", type=_positive, default=1, metavar="N", help="divide heads among N processes")
    add(
        "--timeout",
        type=_positive,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"end all processes if one does not answer for so long (default: {TIMEOUT})",
    )
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--backend", choices=["cpu", "cuda", "reference"], help="force the backend of all ops")
    add("--out", type=_path, metavar="DIR", help="output folder (default: the next runs/train-N)")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out (default: the latest run)",
    )
    add(
        "--compare",
        type=_not_negative,
        default=20,
        metavar="N",
        help="repeat the first N steps with the reference, 0 for none (default: 20)",
    )
    parser.epilog = _listed(FAMILIES)


def generate(parser: argparse.ArgumentParser) -> None:
    """Continue a text with a trained model, and print it while it is generated.

    MODEL is a file of `omniattn train` or of save_model, a run's folder, or a folder of
    transformers' save_pretrained. Files read and write bytes of UTF-8; folders of transformers
    bring their tokenizer. An encoder-decoder reads the prompt as its source.
    """
    add = parser.add_argument
    add("model", type=_path, metavar="MODEL", help="checkpoint, or folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--tokens", metavar="IDS", help="token ids to continue, such as 5,17,3")
    add("--max-new-tokens", type=_not_negative, default=100, help="default: 100")
    add("--temperature", type=float, help="default: 0.8, with --num-beams 0, which is greedy")
    add("--top-k", type=_not_negative, default=0, help="keep the k most probable tokens")
    add("--top-p", type=float, default=0.95, help="keep this much probability (default: 0.95)")
    add("--min-p", type=float, default=0.0, help="keep tokens above this share of the best one")
    add("--repetition-penalty", type=float, default=1.0, help="above 1 avoids repetitions")
    add("--num-beams", type=_positive, default=1, help="beam search (default: 1, none)")
    add("--length-penalty", type=float, default=1.0, help="of beam search (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end here; may be repeated")
    add("--num-draft-tokens", type=_not_negative, default=0, help="drafts of the model's own")
    add("--seed", type=_seed, default=0, help="seed of the draws (default: 0)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: that of the weights")
    add(
        "--kv-dtype", choices=["int8"], help="of cached keys and values (default: that of the rest)"
    )
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--backend", choices=["cpu", "cuda", "reference"], help="force the backend of all ops")


def check(parser: argparse.ArgumentParser) -> None:
    """Check every op on this machine: errors against fp64, speed against the definition.

    An op passes if, in all cases of its OpSpec, the error of each output against the fp64 reference
    is at most twice that of eager torch in the same dtype (three times for gradients) plus
    rounding. Speed is measured on the first benchmark case, relative to the definition in plain
    torch; benchmarks/run.py in the repository compares with torch's own kernels. The exit code is 1
    if an op exceeds its budget.
    """
    parser.add_argument("ops", nargs="*", metavar="op", help="ops to check (default: all)")
    parser.add_argument("--no-speed", action="store_true", help="check errors only")


def info(parser: argparse.ArgumentParser) -> None:
    """Show what this installation uses: CPU, instruction set, threads, CUDA, libraries and ops.

    If CUDA is not used, shows why and what to do.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def hub(parser: argparse.ArgumentParser) -> None:
    """Write a kernel repository that Hugging Face's `kernels` loads from a local folder.

        omniattn hub DIR
        kernels.get_local_kernel(Path("DIR"))
        kernels.LocalLayerRepository(Path("DIR"), layer_name="RMSNorm")

    DIR/build/torch-stable-abi211-cpu-<machine>-linux gets this package with its native library,
    layers with the names that transformers uses, and the metadata. A process can load only one
    version of the package, from the repository or installed, since both define
    torch.ops.omniattn.
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--cuda",
        metavar="VERSION",
        help="add a variant with the CUDA library; VERSION built it, for example 13.0",
    )
    parser.add_argument(
        "--archs",
        nargs="+",
        default=["8.0", "9.0"],
        help="compute capabilities of the CUDA library (default: 8.0 9.0)",
    )


def calc(parser: argparse.ArgumentParser) -> None:
    """Calculate parameters, operations, memory and times of models, without running them.

    A model is a preset of omniattn.models, such as llama-3-8b, a Hugging Face config.json or its
    folder, a checkpoint or a run's folder, or FILE.py:NAME, the config NAME of a Python file, which
    is executed. Operations count a multiply-add as two and attention by its visible pairs. Times
    are the least that the given ceilings allow: all weights and caches are read once.
    """
    add = parser.add_argument
    add("models", nargs="*", metavar="model", help="preset, file, folder or FILE.py:NAME")
    add(
        "--compare",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="further models, side by side",
    )
    add("--context", type=_positive, help="tokens of a sequence (default: 2048, or all positions)")
    add("--source", type=_positive, help="tokens of an encoder-decoder's source (default: context)")
    add("--batch", type=_positive, default=1, help="sequences (default: 1)")
    add(
        "--dtype",
        choices=["bf16", "fp16", "fp32", "fp64"],
        default="bf16",
        help="of weights, caches and scores (default: bf16)",
    )
    add(
        "--device",
        choices=("a100", "h100", "h200", "b200"),
        help="--peak, --bandwidth and --link (NVLink) of a GPU where they are not given",
    )
    add("--peak", type=_rate, metavar="TFLOPS", help="operations per second, in 10^12")
    add("--bandwidth", type=_rate, metavar="GBS", help="bytes per second, in 10^9")
    add(
        "--mesh",
        type=_mesh,
        metavar="dp=N,..",
        help="count what a rank of pp, dp, fsdp, cp, ep, tp stores and sends in a training step of "
        "--batch sequences on all ranks",
    )
    add("--accumulate", type=_positive, default=1, help="parts of a rank's batch (default: 1)")
    add("--link", type=_rate, metavar="GBS", help="bytes that a rank sends per second, in 10^9")
    add("--patterns", action="store_true", help="count the pairs of sparse patterns")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=_path, metavar="FILE", help="draw the models, for example calc.png")


def compare(parser: argparse.ArgumentParser) -> None:
    """Train several mixers under one budget on the same data, and write a report.

    The models are decoders that differ in their mixers; the hidden width of their MLPs is solved so
    that parameters or operations are equal within 2 %. The output folder gets compare.md,
    compare.png and cells/, the results one by one: a further call with the same options continues,
    and one with more models, parts or repeats computes what is missing. The defaults take about 10
    minutes on two cores.
    """
    add = parser.add_argument
    add("--models", type=_models, metavar="A,B", help="see below; default: a choice of them")
    add("--parts", type=_among(PARTS), metavar="A,B", help=f"default: {','.join(PARTS)}")
    add("--tasks", type=_among(TASKS), metavar="A,B", help="recall tasks; default: all")
    add("--budget", choices=["params", "flops"], help="what is equal (default: params)")
    add("--size", type=_positive, metavar="N", help="parameters, or operations per token")
    add("--dim", type=_positive, help="largest width (default: 64)")
    add("--layers", type=_positive, help="default: 4")
    add("--heads", type=_positive, help="default: 2")
    add("--steps", type=_positive, help="optimizer steps on text (default: 150)")
    add("--batch", type=_positive, help="sequences per step (default: 8)")
    add("--length", type=_positive, help="tokens of a sequence of text (default: 128)")
    add("--recall-steps", type=_positive, metavar="N", help="largest number (default: 300)")
    add("--recall-length", type=_positive, metavar="N", help="tokens of a task (default: 32)")
    add("--ratios", type=_ratios, metavar="N:M,..", help="of hybrids in recall (3:1,1:1)")
    add("--norm-steps", type=_positive, metavar="N", help="default: 40")
    add("--norm-layers", type=_positive, metavar="N", help="default: 8")
    add("--decode-lengths", type=_lengths, metavar="N,..", help="default: 128,512,2048")
    add("--test-lengths", type=_lengths, metavar="N,..", help="of positions, as multiples")
    add("--lr", type=_rate, help="peak learning rate (default: 0.003)")
    add("--repeats", type=_positive, help="seeds (default: 1)")
    add("--seed", type=_not_negative, help="first seed (default: 0)")
    add("--data", type=_path, metavar="PATH", help="text file, or folder of text files")
    add(
        "--out",
        type=_path,
        metavar="DIR",
        default=Path("runs/compare"),
        help="default: runs/compare",
    )
    parser.epilog = (
        f"{_listed(COMPARED)}\n  hybrids:\n    NAME@n:m, n layers of a mixer and m of llama\n"
        "  yours:\n    FILE.py:NAME, a Mixer, its Config, the config of a decoder, or a class\n"
        "    that makes a module (B, T, dim) -> (B, T, dim) from dim; the file is executed"
    )


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    f.__name__: f for f in (train, generate, check, info, calc, compare, hub)
}


def _listed(families: dict[str, tuple[str, ...]]) -> str:
    """Returns the names of models, family by family, for the end of a help text."""
    wrap = textwrap.TextWrapper(88, initial_indent="    ", subsequent_indent="    ")
    wrap.break_on_hyphens = False
    lines = (f"  {family}:\n{wrap.fill(', '.join(n))}" for family, n in families.items())
    return "\n".join(("models:", *lines))


def _path(text: str) -> Path:
    if not text:  # from an unset shell variable; Path("") is the current folder
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _model(text: str) -> str:
    names = [name for family in FAMILIES.values() for name in family]
    if text not in names:
        hint = did_you_mean(text, names)
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text!r}{hint}")
    return text


def _reference(text: str) -> tuple[Path, str]:
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"must be a Python file and a name in it, such as file.py:CONFIG, got {text!r}"
        )
    return _path(path), name


def _models(text: str) -> list[str | tuple[Path, str]]:
    names = [name for family in COMPARED.values() for name in family]
    found: list[str | tuple[Path, str]] = []
    for model in text.split(","):
        if ".py:" in model:
            found.append(_reference(model))
            continue
        base = model.partition("@")[0]
        if base not in names:
            hint = did_you_mean(base, names)
            raise argparse.ArgumentTypeError(
                f"must be among {', '.join(names)}, NAME@n:m or FILE.py:NAME, got {model!r}{hint}"
            )
        found.append(model)
    return found


def _among(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                hint = did_you_mean(name, known)
                raise argparse.ArgumentTypeError(
                    f"must be among {', '.join(known)}, got {name!r}{hint}"
                )
        return found

    return names


def _ratios(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _positive(text: str) -> int:
    value = _integer(text)
    if not 0 < value < 2**31:
        raise argparse.ArgumentTypeError(f"must be from 1 to 2^31 - 1, got {value}")
    return value


def _not_negative(text: str) -> int:
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and > 0, got {text}")
    return value


def _mesh(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or name in found:
            raise argparse.ArgumentTypeError(f"must be as dp=8,tp=4, got {text!r}")
        found[name] = _positive(size)
    return found


def _seed(text: str) -> int:
    value = _integer(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must fit into 64 bits, got {value}")
    return value
