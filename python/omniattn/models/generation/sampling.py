"""Distributions of the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Samples one token per row: logits (B, V), uniform (B,) in [0, 1) -> tokens (B,) int64.

    The distribution softmax(logits / temperature) is cut to its top_k largest tokens (0: all),
    then to the smallest prefix, in descending order, whose probabilities sum to at least top_p,
    then to the tokens whose probability is at least min_p times the largest one.
    Ties are ordered by token id. The result is the first token, in id order, whose cumulative
    probability exceeds `uniform`. temperature = 0 selects the largest logit.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1)
    ordered, index = (logits / temperature).sort(stable=True, dim=-1, descending=True)
    if top_k > 0:
        ordered[:, top_k:] = -math.inf
    p = ordered.softmax(-1)
    if top_p < 1:
        p = p * (p.cumsum(-1) - p < top_p)
    if min_p > 0:
        p = p * (p >= min_p * p[:, :1])
    # fp64, so that uniform < 1 stays below the total for any vocabulary.
    cdf = torch.zeros_like(p).scatter(-1, index, p).double().cumsum(-1)
    return torch.searchsorted(cdf, uniform.double()[:, None] * cdf[:, -1:], right=True).squeeze(-1)


def penalized(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Makes tokens that a sequence has already less probable (Keskar et al. 2019, 1909.05858).

    Scores (N, V), logits or log probabilities, of the ids in tokens (N, T) are divided by the
    penalty where they are positive, else multiplied; 1 changes nothing.
    """
    if penalty == 1:
        return scores
    own = scores.gather(-1, tokens)
    return scores.scatter(-1, tokens, torch.where(own < 0, own * penalty, own / penalty))
