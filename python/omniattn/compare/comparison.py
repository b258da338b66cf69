"""Runs a comparison."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.compare import answers, decoding, losses, norms, positions
from omniattn.compare.budget import Sized, solve
from omniattn.compare.candidates import candidates, hybrid
from omniattn.compare.causality import require_causal
from omniattn.compare.cells import Cell, complete
from omniattn.compare.figures import draw
from omniattn.compare.mixers import Candidate, Frame
from omniattn.compare.recall import TASKS, RecallTask
from omniattn.compare.report import Report, report
from omniattn.compare.settings import PARTS, Settings, require_parts
from omniattn.suggestions import did_you_mean
from omniattn.training import LanguageModeling
from omniattn.training.data import read_documents

#: Models of a comparison by default.
DEFAULT_MODELS = ("llama", "gated-deltanet", "mamba2", "rwkv7", "rnn", "lstm", "gru")


def run(
    models: Sequence[Any] | Mapping[str, Any] = DEFAULT_MODELS,
    *,
    parts: Sequence[str] = PARTS,
    out: Path | str = "runs/compare",
    data: Path | str | None = None,
    tasks: Sequence[str] = tuple(TASKS),
    settings: Settings | None = None,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Trains models under one budget on the same data and seeds, and writes a report.

    The models are decoders with the same blocks, except for their mixers; the hidden width of the
    channel mixers is solved so that all have the same number of parameters or operations. Results
    are stored one by one in `out`, so that a further call with the same settings continues.

    Args:
        models: names of :data:`KINDS`, such as "llama", "mamba2" or "lstm"; "NAME@n:m" for n layers
            of a mixer and m of attention in turn; a :class:`omniattn.modules.Mixer` or its Config;
            the config of a decoder, of which only `hidden_dim` changes; or a class or function that
            makes a module (B, T, dim) -> (B, T, dim) from dim, which must be causal. A dict maps
            names in the report to models.
        parts: any of :data:`PARTS`.
        out: folder of the results, of compare.md and of compare.png.
        data: file or folder of text; None: the source of Python's standard library.
        tasks: recall tasks, any of :data:`TASKS`.
        settings: sizes, lengths, steps and seeds; default: ``Settings(**options)``.
        progress: True to show the progress.
        options: fields of :class:`Settings`.

    Returns:
        The tables, also as Markdown.

    Raises:
        ValueError: an option is invalid, a module sees later tokens, a budget cannot be met
            (BudgetError), or `out` holds results of other settings (FolderError).
        OSError: a file cannot be read or written.
    """
    settings = _settings(settings, options)
    parts = require_parts(parts)
    found = candidates(models)
    recalled = _tasks(tasks, settings)
    frame = Frame(settings.dim, settings.layers, settings.heads)
    text = read_documents(data) if {"loss", "positions", "norms"}.intersection(parts) else b""
    sized = [solve(model, settings, frame, settings.length) for model in found]
    for model, size in zip(found, sized, strict=True):
        require_causal(model, size)
    folder = Path(out)
    cells = list(_cells(parts, found, sized, recalled, frame, settings, text))
    folder.mkdir(parents=True, exist_ok=True)
    results = complete(folder, cells, progress=progress)
    made = report(folder, sized, settings, results)
    (folder / "compare.md").write_text(made.markdown, encoding="utf-8")
    draw(made, folder / "compare.png")
    return made


def _settings(settings: Settings | None, options: dict[str, Any]) -> Settings:
    known = [field.name for field in fields(Settings)]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, [*inspect.signature(run).parameters, *known])
            raise TypeError(f"compare: unknown option {name!r}{hint}")
    if settings is None:
        return Settings(**options)
    if options:
        raise TypeError(f"compare: give settings or {', '.join(options)}, got both")
    return settings


def _tasks(names: Sequence[str], settings: Settings) -> list[RecallTask]:
    for name in names:
        if name not in TASKS:
            raise ValueError(
                f"compare: tasks must be among {', '.join(TASKS)}, "
                f"got {shown(name)}{did_you_mean(name, TASKS)}"
            )
    try:
        return [TASKS[name](settings.recall_length) for name in names]
    except ValueError as error:  # too short
        raise ValueError(f"compare: recall_length is invalid: {error}") from error


def _texts(text: bytes, length: int) -> LanguageModeling:
    try:
        return LanguageModeling(text, length)
    except ValueError as error:
        raise ValueError(f"compare: {error}") from error


def _cells(
    parts: Sequence[str],
    found: Sequence[Candidate],
    sized: Sequence[Sized],
    recalled: Sequence[RecallTask],
    frame: Frame,
    settings: Settings,
    text: bytes,
) -> Iterator[Cell]:
    if "loss" in parts:
        yield from losses.cells(sized, settings, _texts(text, settings.length))
    if "decode" in parts:
        yield from decoding.cells(sized, settings)
    if "recall" in parts:
        recurrent = [each for each in found if each.kinds and each.kinds[0].recurrent]
        hybrids = [hybrid(recurrent[0], ratio) for ratio in settings.ratios if recurrent]
        named = {each.name: each for each in chain(found, hybrids)}
        pairs = [
            (task, solve(each, settings, replace(frame, vocab=task.vocab_size), settings.length))
            for task in recalled
            for each in named.values()
        ]
        yield from answers.cells(pairs, settings)
    if "positions" in parts:
        yield from positions.cells(frame, settings, lambda n: _texts(text, n))
    if "norms" in parts:
        yield from norms.cells(frame, settings, _texts(text, settings.length))
