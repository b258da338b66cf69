"""Benchmark rows of published forms that are not ops: layers, compositions and functions.

Each form in docs/variants.md has a row here or is a case of an op (`rows.py`). Baselines:

- "aten": the layer in plain torch, with torch's attention kernel if it supports the options;
- "eager", "hf": the formula in plain torch, as in papers and transformers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from baselines.attention import sdpa_attention
from torch import Tensor, nn

from omniattn import reference
from omniattn.encoding.masks import MaskKind, Rules

#: Function that a provider runs, and the tensors whose gradients it computes.
Provider = tuple[Callable[[], Any], list[Tensor]]


@dataclass(frozen=True)
class System:
    """Equivalent providers of one form, ours first."""

    case: str
    make: Callable[[], dict[str, Provider]]

    def steps(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """Returns a forward and backward of each provider, which returns outputs and gradients."""
        return {name: step(*provider) for name, provider in self.make().items()}


def step(call: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        found = call()
        outputs = tuple(found) if isinstance(found, tuple | list) else (found,)
        ways = [out for out in outputs if out.requires_grad]
        if not leaves or not ways:
            return outputs
        given = [torch.arange(1.0, 1 + out.numel()).cos().view_as(out) for out in ways]
        grads = torch.autograd.grad(ways, leaves, given, allow_unused=True)
        return (*outputs, *(g for g in grads if g is not None))

    return run


def same_results(name: str, found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Raises unless outputs and gradients equal ours up to rounding of their dtype."""
    if len(found) != len(want):
        raise AssertionError(f"{name} gives {len(found)} results, ours {len(want)}")
    for got, of_ours in zip(found, want, strict=True):
        size = float(of_ours.detach().abs().max()) if of_ours.numel() else 0.0
        rounding = torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
        rtol = max(1e-3, 2 * rounding)
        torch.testing.assert_close(got, of_ours, rtol=rtol, atol=rtol / 10 * size + 1e-6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Makes random inputs that require gradients."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.requires_grad_()


def system(case: str) -> Callable[[Callable[[], dict[str, Provider]]], System]:
    return lambda make: System(case, make)


def functions(leaves: list[Tensor], **providers: Callable[..., Any]) -> dict[str, Provider]:
    """Returns providers that share the same tensors."""
    return {name: (functools.partial(f, *leaves), leaves) for name, f in providers.items()}


def layer(
    config: Any,
    *inputs: Tensor,
    call: Callable[..., Any] = lambda m, *x: m(*x),
    merges: bool = False,
    **build: Any,
) -> dict[str, Provider]:
    """Returns a layer of this config, and its equivalent in plain torch.

    A layer that merges parts by their lse needs the definition of attention: torch's kernel gives
    no lse.
    """
    torch.manual_seed(0)
    ours = config.build(**build)
    theirs = config.with_backend("reference").build(**build)
    theirs.load_state_dict(ours.state_dict())
    leaves = [t for t in inputs if t.requires_grad]

    def plain() -> Any:
        with contextlib.nullcontext() if merges else torch_attention():
            return call(theirs, *inputs)

    return {
        "ours": (lambda: call(ours, *inputs), [*leaves, *ours.parameters()]),
        "aten": (plain, [*leaves, *theirs.parameters()]),
    }


_definition = reference.attention


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any) -> Any:
    """Computes attention's definition by torch's kernel, if it supports all options."""
    tq, tk, heads = q.shape[1], k.shape[1], q.shape[2]
    wanted = {name: value for name, value in options.items() if value is not None}
    mask, relative = wanted.pop("mask", None), wanted.pop("relative", None)
    if not wanted.get("dropout_p"):
        wanted.pop("seed", None)
    if isinstance(mask, Rules):
        causal = [rule[:3] for rule in mask.found] == [(MaskKind.WINDOW, -1, 0)] and tq == tk
        wanted["causal"] = causal
        if mask.found and not causal:
            wanted["mask"] = mask.visible(tq, tk, q.device, heads)
    if relative is not None:
        term = relative.term(torch.arange(tk - tq, tk)[:, None], torch.arange(tk), q.dtype)
        wanted["bias"] = wanted["bias"] + term if "bias" in wanted else term
    if "bias" in wanted and (wanted.pop("causal", False)):
        wanted["mask"] = torch.ones(tq, tk, dtype=torch.bool).tril()
    try:
        out = sdpa_attention(q, k, v, **wanted)
    except NotImplementedError:
        return _definition(q, k, v, return_lse=return_lse, **options)
    return (out, q.new_zeros(len(q), heads, tq)) if return_lse else out


@contextlib.contextmanager
def torch_attention() -> Iterator[None]:
    """Makes backend="reference" use torch's attention kernel."""
    reference.attention = _sdpa  # type: ignore[assignment]
    try:
        yield
    finally:
        reference.attention = _definition


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes transformers' rotary embedding of x (B, T, H, D), with cos and sin (T, Dr)."""
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = rotated.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return torch.cat((rotated * cos[:, None] + turned * sin[:, None], rest), -1)


class Plain(nn.Module):
    """Wraps a function as a block, for layers that take blocks."""

    def __init__(self, width: int, backend: str | None) -> None:
        super().__init__()
        from omniattn.modules import GatedMLP

        self.mlp = GatedMLP(GatedMLP.Config(width, 2 * width, backend=backend))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out
