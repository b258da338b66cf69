"""Inputs of the losses that are named as Liger's, and log-probabilities from all logits."""

import torch
import torch.nn.functional as nnf

B, T, K, V = 2, 5, 4, 11


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in shapes]


X, WEIGHT, BIAS, REF_X, REF_WEIGHT = tensors((2 * B, T, K), (V, K), (V,), (2 * B, T, 3), (V, 3))
TARGET = torch.randint(V, (2 * B, T), generator=torch.Generator().manual_seed(1))
TARGET[0, :2] = TARGET[3, 4] = -100


def log_probs(x, weight, bias=None, average=False):
    """(tokens, sequences) from all logits."""
    kept = TARGET != -100
    logits = nnf.linear(x, weight, bias).log_softmax(-1)
    tokens = logits.gather(-1, TARGET.clamp(min=0)[..., None])[..., 0] * kept
    return tokens, tokens.sum(-1) / (kept.sum(-1) if average else 1)


def leaves():
    return [t.clone().requires_grad_() for t in (WEIGHT, X, BIAS)]
