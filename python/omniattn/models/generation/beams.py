"""Beam search."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.models.generation.options import Beams, Generation
from omniattn.models.generation.run import Endings, Run
from omniattn.models.generation.sampling import penalized


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Selects for each sequence b the rows x[b, index[b]]: x (B, N, ...), index (B, M)."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


class _Finished:
    """The best ended sequences of each prompt, with their scores: sequences (B, K, T)."""

    def __init__(self, sequences: Tensor, options: Beams) -> None:
        self._options = options
        self._sequences = sequences
        self._scores = sequences.new_full(sequences.shape[:2], -math.inf, dtype=torch.float32)
        self._lengths = torch.zeros_like(self._scores, dtype=torch.long)
        self._improvable = torch.ones_like(self._scores[:, :1], dtype=torch.bool)

    @property
    def _full(self) -> Tensor:
        """Whether a prompt has K ended sequences: (B, 1)."""
        return self._scores.isfinite().all(-1, keepdim=True)

    def add(self, sequences: Tensor, log_probs: Tensor, ended: Tensor, new: int) -> None:
        """Merges candidates (B, N, T) of `new` generated tokens, as far as they have `ended`."""
        wanted = ended & self._improvable
        if self._options.early_stopping:
            wanted &= ~self._full
        scores = (log_probs / new**self._options.length_penalty).masked_fill(~wanted, -math.inf)
        self._scores, best = torch.cat([self._scores, scores], 1).topk(self._scores.shape[1])
        lengths = torch.full_like(scores, new, dtype=torch.long)
        self._lengths = torch.cat([self._lengths, lengths], 1).gather(1, best)
        self._sequences = _rows(torch.cat([self._sequences, sequences], 1), best)

    def is_final(self, running: Tensor, new: int) -> bool:
        """Whether no running sequence, of log probabilities (B, K), improves on the ended ones.

        A running sequence is taken to end at once. This is exact without a length penalty.
        """
        possible = running[:, :1] / new**self._options.length_penalty
        self._improvable &= ~self._full | (possible > self._scores[:, -1:])
        if self._options.early_stopping and bool(self._full.all()):
            return True
        return not bool(self._improvable.any())

    def best(self, start: int) -> Tensor:
        """Returns the best sequences (B, T); shorter ones repeat their last token."""
        lengths = start + self._lengths[:, :1]
        position = torch.arange(int(lengths.max()), device=lengths.device)
        return self._sequences[:, 0].gather(1, torch.minimum(position, lengths - 1))


def beam_search(
    run: Run,
    tokens: Tensor,
    max_new_tokens: int,
    options: Generation,
    beams: Beams,
) -> Tensor:
    """Returns the continuation (B, T + n) of each prompt with the largest score found.

    The score of n new tokens is the sum of their log probabilities / n^length_penalty. Each step
    keeps the K most probable sequences that have not ended; a sequence that ends counts if it is
    among the K most probable of the step. This is the rule of transformers' `num_beams`.
    """
    (batch, start), k = tokens.shape, beams.num_beams
    endings = Endings(options, tokens)
    out = torch.cat([tokens, tokens.new_zeros(batch, max_new_tokens)], 1)
    out = out[:, None].repeat(1, k, 1)
    # The beams of a prompt are equal at first: all but one count as impossible.
    running = out.new_full((batch, k), -math.inf, dtype=torch.float32)
    running[:, 0] = 0
    finished = _Finished(out, beams)
    # All K best may end with each of the ids that end: enough others are left to go on.
    candidates = k * max(2, 1 + len(options.ends))
    first = torch.arange(batch, device=tokens.device)[:, None] * k
    logits = run.logits(tokens)
    run.reorder(torch.arange(batch, device=tokens.device).repeat_interleave(k))
    logits = logits.repeat_interleave(k, 0)
    for end in range(start, start + max_new_tokens):
        new = end - start + 1
        log_probs = logits.float().log_softmax(-1)
        log_probs = penalized(log_probs, out[..., :end].flatten(0, 1), options.repetition_penalty)
        vocab = log_probs.shape[-1]
        total = running[..., None] + log_probs.view(batch, k, vocab)
        scores, index = total.flatten(1).topk(min(candidates, k * vocab))
        origin, sequences = index // vocab, _rows(out, index // vocab)
        sequences[..., end] = index % vocab
        ended = endings.hits(sequences[..., : end + 1]) | (new == max_new_tokens)
        finished.add(sequences[:, :k], scores[:, :k], ended[:, :k], new)
        if bool(ended.all()):
            break
        running, best = scores.masked_fill(ended, -math.inf).topk(k)
        out = _rows(sequences, best)
        if finished.is_final(running, new):
            break
        run.reorder((first + origin.gather(1, best)).flatten())
        logits = run.logits(out[..., end].reshape(-1, 1))
    return finished.best(start) if max_new_tokens else tokens
