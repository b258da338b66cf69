"""Generation of tokens, one a step or several by drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import functional
from omniattn.encoding.records import spelled_out
from omniattn.models.generation.beams import beam_search
from omniattn.models.generation.drafts import Drafts
from omniattn.models.generation.options import (
    Beams,
    Generation,
    GenerationOptions,
    check_beams,
    checked,
)
from omniattn.models.generation.protocol import Generator
from omniattn.models.generation.run import Endings, Run
from omniattn.models.generation.sampling import penalized, sample


@contextmanager
def _evaluating(model: Generator) -> Iterator[None]:
    """Runs the model in eval mode, then restores its mode."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


def _choose(logits: Tensor, before: Tensor, step: int, rules: Generation) -> Tensor:
    """Returns the next token (B,) of each row, by its logits (B, V) and the tokens before it."""
    logits = penalized(logits.float(), before, rules.repetition_penalty)
    seed = torch.tensor([rules.seed, step])
    return sample(
        logits,
        functional.uniform_like(logits[:, 0], seed=seed),
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
    )


def _steps(
    model: Generator, tokens: Tensor, max_new_tokens: int, rules: Generation
) -> Iterator[Tensor]:
    """Yields the new tokens (B, n) of each step."""
    batch, start = tokens.shape
    run = Run(model, batch, start + max_new_tokens, rules)
    drafts = Drafts(run, batch, start + max_new_tokens, rules.num_draft_tokens)
    endings = Endings(rules, tokens)
    out = torch.cat([tokens, tokens.new_zeros(batch, max_new_tokens)], 1)
    ended = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    end = start
    while end < out.shape[1] and not ended.all():

        def choose(logits: Tensor, at: int) -> Tensor:
            return _choose(logits, out[:, :at], at - start, rules)

        drafted = drafts.propose(out, end, choose)
        first, read = end, run.length
        hidden = run.hidden(out[:, read : end + drafted])
        # The head needs only the positions whose next token is not known.
        logits = model.head(hidden[:, -1 - drafted :])
        for n in range(drafted + 1):
            token = torch.where(ended, out[:, end - 1], choose(logits[:, n], end))
            as_drafted = n < drafted and bool(((out[:, end] == token) | ended).all())
            out[:, end] = token
            end += 1
            ended |= endings.hits(out[:, :end])
            if not as_drafted or ended.all():
                break
        run.crop(end - 1)
        drafts.read(hidden[:, : end - 1 - read])
        yield out[:, first:end]


@torch.no_grad()
def _streamed(
    model: Generator, tokens: Tensor, max_new_tokens: int, rules: Generation
) -> Iterator[Tensor]:
    with _evaluating(model):
        yield from _steps(model, tokens, max_new_tokens, rules)


@spelled_out(GenerationOptions, Generation)
def stream(
    model: Generator, tokens: Tensor, max_new_tokens: int, **options: Unpack[GenerationOptions]
) -> Iterator[Tensor]:
    """Continues each row of tokens and yields the new tokens of each step.

    Args:
        model, tokens, max_new_tokens, options: as of `generate`, without beams.

    Yields:
        (B, n) int64: n = 1 without drafts. Stopping early is possible at any step.

    Example:
        >>> from omniattn.models import PRESETS, Llama
        >>> model = Llama(PRESETS["llama-test"])
        >>> [new.shape[1] for new in stream(model, torch.zeros(1, 4, dtype=torch.long), 3)]
        [1, 1, 1]
    """
    rules = checked("stream", model, tokens, max_new_tokens, options)
    return _streamed(model, tokens.long(), max_new_tokens, rules)


@spelled_out(GenerationOptions, Generation)
@torch.no_grad()
def generate(
    model: Generator,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    **options: Unpack[GenerationOptions],
) -> Tensor:
    """Continues each row of tokens.

    Args:
        model: a Decoder, an EncoderDecoder with a source, or any other model with the methods of
            Generator. It runs in eval mode; its mode is restored afterwards.
        tokens: (B, T) int, the prompts, T > 0.
        max_new_tokens: maximum number of new tokens; generation stops when all rows have ended.
        num_beams: number of beams, K: the K most probable continuations are kept at each step, and
            the one of the largest score found is returned; 1 (default) is no beam search.
        length_penalty, early_stopping: the score of n new tokens is the sum of their log
            probabilities / n^length_penalty; a search ends when no beam can still improve on its
            K ended ones, if they ended now, or with early_stopping as soon as there are K.
        temperature: 0 (greedy, default) or the divisor of the logits.
        top_k, top_p, min_p: truncation of the distribution, see `sample`; 0, 1 and 0 disable it.
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of
            tokens that a row has already; 1 disables it.
        eos: token or tokens that end a row.
        stop: sequences of tokens that end a row that has generated one of them as a whole. A row
            that has ended repeats its last token up to the common length.
        num_draft_tokens: number of tokens that the model's own multi-token predictor drafts and
            the model then checks in one step; at most its depths. Drafting does not change the
            tokens, whether greedy or drawn.
        seed: seed of the uniform numbers, which depend only on (seed, step, row).
        source: (B, S) int, input of the encoder, if the model has one.
        eviction: eviction policy of the caches, if the model's `new_state` accepts it.
        source_mask: (B, S) bool, False for padding of the source.
        kv_dtype: torch.int8 to store keys and values in int8, if the model's `new_state` accepts
            it.

    Returns:
        (B, T + n) int64 with n <= max_new_tokens.

    Raises:
        TypeError, ValueError: the prompt is empty, or an argument has a wrong type or value.

    Reference:
        Beams as in Hugging Face transformers; drafts: Leviathan et al., "Fast Inference from
        Transformers via Speculative Decoding", 2023, arXiv 2211.17192, and DeepSeek-AI,
        "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 5.4.3.

    Example:
        >>> from omniattn.models import PRESETS, Llama
        >>> model = Llama(PRESETS["llama-test"])
        >>> generate(model, torch.zeros(1, 4, dtype=torch.long), 3).shape
        torch.Size([1, 7])
    """
    rules = checked("generate", model, tokens, max_new_tokens, options)
    beams = Beams(num_beams, length_penalty, early_stopping)
    check_beams("generate", beams, rules, model.config.vocab_size)
    tokens = tokens.long()
    with _evaluating(model):
        if num_beams == 1:
            return torch.cat([tokens, *_steps(model, tokens, max_new_tokens, rules)], 1)
        length = tokens.shape[1] + max_new_tokens
        run = Run(model, tokens.shape[0], length, rules)
        return beam_search(run, tokens, max_new_tokens, rules, beams)
