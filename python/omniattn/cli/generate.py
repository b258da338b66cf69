"""omniattn generate: continues a text with a checkpoint or a folder of transformers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from omniattn.cli.device import require_device
from omniattn.cli.errors import CommandError, require
from omniattn.models import CheckpointError, Model, from_hf, generate, load_model, stream
from omniattn.models.generation import Generator


class Tokenizer(Protocol):
    """Translates between text and token ids."""

    def encode(self, text: str, /, *, prompt: bool = False) -> list[int]:
        """Returns the ids of a text; a prompt gets the special tokens that its model expects."""

    def decode(self, ids: list[int], /) -> str:
        """Returns the text of ids."""


class Bytes:
    """The tokens of `omniattn train`: bytes of UTF-8."""

    def encode(self, text: str, /, *, prompt: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], /) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Subwords:
    """The tokenizer in a folder of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CommandError(
                f"{folder} has no tokenizer; save it there with tokenizer.save_pretrained, "
                f"or give the prompt as --tokens ({str(error).splitlines()[0]})"
            ) from error

    def encode(self, text: str, /, *, prompt: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=prompt))

    def decode(self, ids: list[int], /) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class Ids:
    """Numbers in place of text."""

    def encode(self, text: str, /, *, prompt: bool = False) -> list[int]:
        return [int(word) for word in text.replace(",", " ").split()]

    def decode(self, ids: list[int], /) -> str:
        return " ".join(map(str, ids))


class Printer:
    """Prints the text of a growing list of ids, each character once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = 0

    def add(self, ids: list[int], *, last: bool = False) -> None:
        """Prints what more ids add, without characters whose bytes are not all known."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if last or not text.endswith("\ufffd"):
            print(text[self._printed :], end="", flush=True)
            self._printed = len(text)


def run(args: argparse.Namespace) -> int:
    """Generates and prints the text; the speed goes to stderr."""
    require("safetensors")
    require_device(args.device, args.backend)
    path = _path(args.model)
    tokenizer = _tokenizer(path, args.tokens)
    prompt = _ids(tokenizer, args.tokens if args.prompt is None else args.prompt, prompt=True)
    stop = [_ids(tokenizer, text) for text in args.stop]
    model, ends = _load(path, args)
    options: dict[str, Any] = {name: getattr(args, name) for name in _OPTIONS}
    options |= {"eos": ends or None, "stop": stop}
    if args.kv_dtype is not None:
        if hasattr(model, "encode"):
            raise CommandError(f"--kv-dtype needs a decoder, got a {type(model).__name__}")
        options["kv_dtype"] = getattr(torch, args.kv_dtype)
    if args.temperature is None:
        options["temperature"] = 0.8 if args.num_beams == 1 else 0.0
    if args.num_beams > 1:
        options |= {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    tokens = torch.tensor([prompt], device=args.device)
    if hasattr(model, "encode"):  # the prompt is the source
        start = dict(model.config.token_ids).get("decoder_start_token_id") or 0
        options["source"], tokens = tokens, torch.full_like(tokens[:, :1], start)
    try:
        _print(model, tokens, args.max_new_tokens, options, tokenizer)
    except ValueError as error:
        raise CommandError(str(error).partition(": ")[2]) from error
    return 0


#: Options of `generate` that the command has under the same names.
_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_draft_tokens", "seed"),
)


def _print(
    model: Model,
    tokens: torch.Tensor,
    max_new_tokens: int,
    options: dict[str, Any],
    tokenizer: Tokenizer,
) -> None:
    printer, begin = Printer(tokenizer), time.perf_counter()
    generator, count = cast(Generator, model), 0
    before = [] if "source" in options else tokens[0].tolist()  # printed after all checks
    if "num_beams" in options:
        out = generate(generator, tokens, max_new_tokens, **options)
        steps = iter([out[:, tokens.shape[1] :]])
    else:
        steps = stream(generator, tokens, max_new_tokens, **options)
    for new in steps:
        printer.add(before + new[0].tolist())
        before = []
        count += new.shape[1]
    printer.add(before, last=True)
    seconds = time.perf_counter() - begin
    print(f"\n{count} tokens in {seconds:.2f} s, {count / seconds:.1f} a second", file=sys.stderr)


def _path(given: Path) -> Path:
    """Returns the checkpoint's file, or the folder of transformers."""
    run = given / "checkpoint.safetensors"
    if run.is_file():
        return run
    if not given.is_file() and not (given / "config.json").is_file():
        raise CommandError(
            f"{given} must be a checkpoint, the folder of a run or a folder with config.json"
        )
    return given


def _load(path: Path, args: argparse.Namespace) -> tuple[Model, list[int]]:
    """Returns the model, on its device, and the ids that end its texts."""
    try:
        if path.is_file():
            model, ends = load_model(path, backend=args.backend), []
        else:
            model, ends = from_hf(path, backend=args.backend), _ends(path)
    except (CheckpointError, NotImplementedError) as error:
        raise CommandError(str(error).partition(": ")[2]) from error
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error}") from error
    if not hasattr(model, "new_state"):
        raise CommandError(f"{path} holds a {type(model).__name__}, which generates no tokens")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    return model.to(args.device, dtype), ends


def _ends(folder: Path) -> list[int]:
    """Returns the ids in generation_config.json or config.json that end a text."""
    from transformers import AutoConfig, GenerationConfig

    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        ends = AutoConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def _tokenizer(path: Path, tokens: str | None) -> Tokenizer:
    if tokens is not None:
        return Ids()
    return Bytes() if path.is_file() else Subwords(path)


def _ids(tokenizer: Tokenizer, text: str, *, prompt: bool = False) -> list[int]:
    try:
        ids = tokenizer.encode(text, prompt=prompt)
    except ValueError:
        raise CommandError(f"--tokens needs token ids, such as 5,17,3, got {text!r}") from None
    if not ids:
        raise CommandError("--prompt, --tokens and --stop must have at least one token each")
    return ids
