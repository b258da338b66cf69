"""Arguments of the commands, without torch: the docstring of each function is the help text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

from omniattn.suggestions import did_you_mean

#: Names of the models that `train --model` offers, by family; each is a preset of omniattn.models.
FAMILIES: dict[str, tuple[str, ...]] = {
    "softmax attention": (
        *("llama", "llama-tiny", "llama-medium", "gpt2", "mla", "differential", "selective"),
    ),
    "mixtures of experts": ("mixtral", "switch", "deepseek-moe", "deepseek-moe-mtp"),
    "sparse attention": (
        *("longformer", "bigbird", "hub-spoke", "detsa", "dual-chunk", "local-strided", "nsa"),
        *("moba", "dsa", "routed-blocks"),
    ),
    "linear attention and delta rules": (
        *("linear", "delta-attention", "performer", "gla", "retnet", "deltanet", "gated-deltanet"),
        "kda",
    ),
    "RWKV and xLSTM": ("rwkv4", "rwkv5", "rwkv6", "rwkv7", "xlstm"),
    "state-space models": ("s4d", "mamba", "mamba2"),
    "hybrids": ("jamba", "samba", "zamba2"),
    "encoders and encoder-decoders": ("bert", "t5"),
    "vision": ("vit", "swin"),
}


def train(parser: argparse.ArgumentParser) -> None:
    """Train a small model, by default a byte-level decoder on the standard library's source.

    Writes to the output folder: checkpoint.safetensors (weights and the whole training state),
    loss.png, sample.txt if it writes text, load.png if it has experts. Ctrl-C saves and stops;
    --resume continues bit for bit, and with more --steps beyond the end, at the final learning
    rate. It finds the data of the run by itself; --data gives their new path if they have moved.
    The first steps are repeated with the plain-torch reference of every op, to show the difference
    in loss and, where both sides ran for long enough to tell, in speed.
    """
    add = parser.add_argument
    add("--data", type=_path, metavar="PATH", help="text file, or folder of them")
    add("--model", metavar="NAME", type=_model, help="one of those below (default: llama)")
    add(
        "--config",
        type=_reference,
        metavar="FILE.py:NAME",
        help="a TrainConfig, or the config of a model, in a Python file, which is run; other "
        "options are on top of it (with --resume it gives the model alone)",
    )
    add("--steps", type=_positive, help="optimizer steps (default: 200)")
    add("--batch", type=_positive, help="examples per step (default: 8)")
    add("--length", type=_positive, help="tokens per example of text (default: 256)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32")
    add("--seed", type=_seed, help="of weights, data order and sample (default: 0)")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--backend", choices=["cpu", "cuda", "reference"], help="force all ops")
    add("--out", type=_path, metavar="DIR", help="output folder (default: the next runs/train-N)")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out (default: the latest), beyond its end with more --steps",
    )
    add(
        "--compare",
        type=_not_negative,
        default=20,
        metavar="N",
        help="repeat the first N steps with the reference; 0: do not (default: 20)",
    )
    wrap = textwrap.TextWrapper(88, initial_indent="    ", subsequent_indent="    ")
    wrap.break_on_hyphens = False
    families = (f"  {family}:\n{wrap.fill(', '.join(n))}" for family, n in FAMILIES.items())
    parser.epilog = "\n".join(("models:", *families))


def check(parser: argparse.ArgumentParser) -> None:
    """Check every op on this machine: errors against fp64, speed against the definition.

    An op passes when, over all cases of its OpSpec, no output is further from the fp64 reference
    than twice the error of eager torch in the same dtype (gradients: three times) plus rounding.
    Speed is that of the first case that the op is benchmarked on, against its definition in plain
    torch; benchmarks/run.py of the repository times it against torch's own kernels. Exit code 1 if
    an op is out of budget.
    """
    parser.add_argument("ops", nargs="*", metavar="op", help="default: all of them")
    parser.add_argument("--no-speed", action="store_true", help="errors only")


def info(parser: argparse.ArgumentParser) -> None:
    """Show what runs here: CPU, instruction set, threads, CUDA, libraries and ops.

    Where CUDA is not used, it says why and what to do.
    """
    parser.add_argument("--json", action="store_true", help="the same facts as one JSON object")


def hub(parser: argparse.ArgumentParser) -> None:
    """Write a kernel repository, which Hugging Face's `kernels` loads from its folder.

        omniattn hub DIR
        kernels.get_local_kernel(Path("DIR"))
        kernels.LocalLayerRepository(Path("DIR"), layer_name="RMSNorm")

    DIR/build/torch-stable-abi211-cpu-<machine>-linux gets this package with its native library,
    layers under the names that transformers uses, and the metadata. One process holds one version
    of the package: its ops are torch.ops.omniattn, in the repository and when installed.
    """
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--cuda",
        metavar="VERSION",
        help="add a variant with the CUDA library, which was built by this version, such as 13.0",
    )
    parser.add_argument(
        "--archs",
        nargs="+",
        default=["8.0", "9.0"],
        help="compute capabilities of the CUDA library, default: 8.0 9.0",
    )


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    f.__name__: f for f in (train, check, info, hub)
}


def _path(text: str) -> Path:
    if not text:  # an unset variable of a shell; Path("") is the current folder
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


def _seed(text: str) -> int:
    value = _integer(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must fit into 64 bits, got {value}")
    return value
