"""Token generation with caches and recurrent states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from omniattn import functional
from omniattn.checks.arguments import require_int, require_integers, require_number, require_rows
from omniattn.modules.caches.eviction import Eviction


class Sized(Protocol):
    """A config with a vocabulary size."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are in [0, vocab_size)."""


class Generator(Protocol):
    """Interface of models for `generate`."""

    training: bool

    @property
    def config(self) -> Sized:
        """Config of the model."""

    def new_state(self, batch: int, max_length: int) -> Any:
        """Returns the empty state, which `hidden` reads and updates."""

    @property
    def hidden(self) -> Callable[..., torch.Tensor]:
        """Function hidden(tokens (B, T), state=state) -> hidden states (B, T, dim) for the head.

        With an encoder: hidden(tokens, memory, state=state), where memory is encode(source).
        """

    def head(self, x: torch.Tensor, /) -> torch.Tensor:
        """Maps hidden states (B, dim) to logits (B, vocab_size)."""

    def train(self, mode: bool = True, /) -> Any:
        """Sets the mode, as torch.nn.Module does."""


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Samples one token per row: logits (B, V), uniform (B,) in [0, 1) -> tokens (B,) int64.

    The distribution softmax(logits / temperature) is cut to its top_k largest tokens (0: all),
    then to the smallest prefix, in descending order, whose probabilities sum to at least top_p.
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
    # fp64, so that uniform < 1 stays below the total for any vocabulary.
    cdf = torch.zeros_like(p).scatter(-1, index, p).double().cumsum(-1)
    return torch.searchsorted(cdf, uniform.double()[:, None] * cdf[:, -1:], right=True).squeeze(-1)


def _check(
    vocab: int,
    tokens: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    eos: int | None,
    seed: int,
) -> None:
    op = "generate"
    require_integers(op, "tokens", tokens)
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"{op}: tokens must have shape (B, T) with T > 0, got tokens={tuple(tokens.shape)}"
        )
    require_int(op, "max_new_tokens", max_new_tokens, 0)
    require_number(op, "temperature", temperature, 0)
    require_int(op, "top_k", top_k, 0)
    require_number(op, "top_p", top_p, most=1, above=0)
    require_int(op, "seed", seed)
    if eos is not None:
        require_int(op, "eos", eos, 0, vocab - 1)
    require_rows(op, "tokens", tokens.cpu(), vocab)


def _encoder(model: Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    encode: Callable[[torch.Tensor], torch.Tensor] | None = getattr(model, "encode", None)
    if encode is None:
        raise ValueError(
            f"generate: source must be None, since {type(model).__name__} has no encoder"
        )
    return encode


@torch.no_grad()
def generate(
    model: Generator,
    tokens: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: int | None = None,
    seed: int = 0,
    source: torch.Tensor | None = None,
    eviction: Eviction | Sequence[Eviction] | None = None,
) -> torch.Tensor:
    """Continues each row of tokens.

    Args:
        model: a Decoder, a T5 with a source, or any other model with the methods of Generator. It
            runs in eval mode; its mode is restored afterwards.
        tokens: (B, T) int, the prompts, T > 0.
        max_new_tokens: maximum number of new tokens; generation stops when all rows have ended.
        temperature: 0 (greedy, default) or the divisor of the logits.
        top_k, top_p: truncation of the distribution, see `sample`; 0 and 1 disable it.
        eos: token that ends a row; it is kept and repeated up to the common length.
        seed: seed of the uniform numbers, which depend only on (seed, step, row).
        source: (B, S) int, input of the encoder, if the model has one.
        eviction: eviction policy of the caches, if the model's `new_state` accepts it.

    Returns:
        (B, T + n) int64 with n <= max_new_tokens.

    Raises:
        TypeError, ValueError: the prompt is empty, or an argument has a wrong type or value.

    Example:
        >>> from omniattn.models import PRESETS, Llama
        >>> model = Llama(PRESETS["llama-test"])
        >>> generate(model, torch.zeros(1, 4, dtype=torch.long), 3).shape
        torch.Size([1, 7])
    """
    vocab = model.config.vocab_size
    _check(vocab, tokens, max_new_tokens, temperature, top_k, top_p, eos, seed)
    tokens = tokens.long()
    batch, start = tokens.shape
    training = model.training
    model.train(False)
    new_state: Callable[..., Any] = model.new_state
    more = {} if eviction is None else {"eviction": eviction}
    state = new_state(batch, start + max_new_tokens, **more)
    out = torch.cat([tokens, tokens.new_zeros(batch, max_new_tokens)], 1)
    ended = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    fed, end = 0, start
    try:
        memory = () if source is None else (_encoder(model)(source),)
        while end < out.shape[1] and not ended.all():
            # The head needs only the last position.
            x = model.hidden(out[:, fed:end], *memory, state=state)[:, -1:]
            logits = model.head(x)[:, 0]
            uniform = functional.uniform_like(logits[:, 0], seed=torch.tensor([seed, end - start]))
            token = sample(
                logits,
                uniform,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
            if eos is not None:
                token = token.masked_fill(ended, eos)
                ended |= token == eos
            out[:, end] = token
            fed, end = end, end + 1
    finally:
        model.train(training)
    return out[:, :end]
