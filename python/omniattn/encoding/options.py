"""Options shared by all forms of attention, and the score rules that encode them.

Each option is declared once. Type checkers and editors read the TypedDicts, a call's options are
packed into `Options`, which has the defaults, and `spelled_out` shows both in help().
`functional.attention` documents each option. `reference` uses the definitions of transforms,
normalizers and tables here; csrc/semantics/score_rules.h has their counterparts for kernels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor

from omniattn.encoding import records
from omniattn.encoding.masks import EncodedMask
from omniattn.former_names import present_names

F = TypeVar("F", bound=Callable[..., Any])


class ScoreKind(IntEnum):
    """Kinds of rules, numbered as in csrc/semantics/score_rules.h. Tables are (B | 1, rows, Hq)."""

    BIAS = 0  # added, broadcastable to (B, Hq, Tq, Tk)
    SOFTCAP = 1  # cap * tanh(. / cap)
    SINKS = 2  # (Hq,), one logit per head whose value is 0
    HEAD_SCALE = 3  # (Hq,), factor of scale * q k^T
    SIGMOID = 4  # weights sigmoid(logit) instead of softmax
    RELU2 = 5  # weights relu(logit)^2 instead of softmax
    ALIBI = 6  # - table[0] * |k - i|, i = q + Tk - Tq
    BUCKETS = 7  # table[T5 bucket of k - i]; a: both directions, b: max distance
    DISTANCES = 8  # table[k - i + a], index clamped to the table; a < 0 counts from its end
    WINDOW = 9  # table[place of q - place of k] in a window of a rows and b columns
    PROGRAM = 10  # program of a score_mod, the last rule, see score_program.py
    RELATIVE_KEYS = 11  # scale q_i . rows[k - i + zero], rows (rows, Hq, D), as above
    RELATIVE_QUERIES = 12  # scale k_j . rows[k - i + zero]
    STICK_BREAKING = 13  # weights that break a stick instead of softmax, see break_stick
    SOFTPICK = 14  # weights relu(e^logit - 1) / sum |e^logit - 1| instead of softmax, see pick


Normalizer: TypeAlias = Literal["softmax", "sigmoid", "relu2", "stick_breaking", "softpick"]

#: Option name -> g; an option c > 0 replaces scores s by c g(s / c), 0 is off.
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"softcap": torch.tanh}
#: Normalizers that compute each weight from its own logit.
NORMALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu2": lambda s: torch.relu(s).square(),
}
#: All normalizers, and those among them whose rows have an lse.
ALL_NORMALIZERS = ("softmax", *NORMALIZERS, "stick_breaking", "softpick")
WITH_LSE = ("softmax", "stick_breaking", "softpick")
#: Kinds whose tensor is a table.
TABLES = (ScoreKind.ALIBI, ScoreKind.BUCKETS, ScoreKind.DISTANCES, ScoreKind.WINDOW)

#: kind, parameter tensor, other parameters
ScoreRule = tuple[int, Tensor | None, tuple[float, ...]]


class EncodedTerm:
    """Term of the logits, read from a table."""

    def rule(self) -> ScoreRule:
        raise NotImplementedError

    def term(self, i: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes the term (B | 1, Hq, Tq, Tk) in `dtype` for queries and keys at these positions,
        i (Tq, 1) and k (Tk,)."""
        kind, table, (a, b) = self.rule()
        assert table is not None
        return table_bias(kind, table.to(dtype), int(a), int(b), i, k)

    def of_sequence(self, n: int) -> EncodedTerm:
        """Returns the term for sequence n in a packed or cached batch."""
        kind, table, parameters = self.rule()
        if table is None or len(table) == 1:
            return self
        return Table(kind, table[n : n + 1], parameters)


@dataclass(frozen=True)
class Table(EncodedTerm):
    """Term from a score rule; table (B | 1, rows, Hq)."""

    kind: int
    table: Tensor | None
    parameters: tuple[float, ...]

    def rule(self) -> ScoreRule:
        return self.kind, self.table, self.parameters


def t5_bucket(distance: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """Returns T5's bucket of k - q positions (Raffel et al. 2020, arXiv:1910.10683)."""
    if bidirectional:
        buckets //= 2
        side = (distance > 0) * buckets
        far = distance.abs()
    else:
        side = torch.zeros_like(distance)
        far = (-distance).clamp(min=0)
    exact = buckets // 2
    share = torch.log(far.clamp(min=1) / exact) / math.log(max_distance / exact)
    large = (exact + (share * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return side + torch.where(far < exact, far, large)


def _from_start(zero: int, rows: int) -> int:
    return zero + rows if zero < 0 else zero


def table_bias(kind: int, table: Tensor, a: int, b: int, i: Tensor, k: Tensor) -> Tensor:
    """Computes the term (B | 1, Hq, Tq, Tk) that a table rule adds to the logits."""
    if kind == ScoreKind.ALIBI:
        return table.transpose(1, 2)[..., None] * -(k - i).abs().to(table.dtype)
    if kind == ScoreKind.BUCKETS:
        row = t5_bucket(k - i, bool(a), table.shape[1], b)
    elif kind == ScoreKind.DISTANCES:
        row = (k - i + _from_start(a, table.shape[1])).clamp(0, table.shape[1] - 1)
    else:
        assert kind == ScoreKind.WINDOW, kind
        row = (i // b - k // b + a - 1) * (2 * b - 1) + i % b - k % b + b - 1
    return table[:, row].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class EncodedRows:
    """Vectors per distance: rows[k - i + zero], rows (rows, Hq, D), index clamped to the rows."""

    rows: Tensor
    zero: int

    def times_queries(self, q: Tensor, distance: Tensor) -> Tensor:
        """Returns products (B, Hq, Tq, Tk) of q (B, Hq, Tq, D) and each pair's row."""
        return self._products(q, self._row(distance))

    def times_keys(self, k: Tensor, distance: Tensor) -> Tensor:
        """Returns products (B, Hq, Tq, Tk) of k (B, Hq, Tk, D) and each pair's row."""
        return self._products(k, self._row(distance).T).transpose(-1, -2)

    def _row(self, distance: Tensor) -> Tensor:
        count = self.rows.shape[0]
        return (distance + _from_start(self.zero, count)).clamp(0, count - 1)

    def _products(self, x: Tensor, row: Tensor) -> Tensor:
        products = torch.einsum("bhtd,rhd->bhtr", x, self.rows.to(x.dtype))
        return products.gather(-1, row.expand(*x.shape[:2], -1, -1))


#: f(b, h, q, k) of 0-d tensors, True = attend
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: f(score, b, h, q, k) of 0-d tensors, as torch's flex_attention takes it
ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


#: Indices b, h, q and k of a pair.
Indices: TypeAlias = tuple[int, int, int, int]


class PairMod:
    """score_mod that is evaluated for all pairs at once."""

    def of_pairs(self, score: Tensor, first: Indices) -> Tensor:
        """Returns new scores (B, Hq, Tq, Tk); `first` has the indices of the first one."""
        raise NotImplementedError


class WeightOptions(TypedDict, total=False):
    """Options that determine the attention weights."""

    causal: bool
    window_size: tuple[int, int]
    mask: Tensor | EncodedMask | MaskMod | None
    bias: Tensor | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    relative: EncodedTerm | None
    relative_keys: EncodedRows | None
    relative_queries: EncodedRows | None
    sinks: Tensor | None
    head_scale: Tensor | None
    normalizer: Normalizer
    score_mod: ScoreMod | PairMod | None


class DropoutOptions(TypedDict, total=False):
    """Options of dropout."""

    dropout_p: float
    seed: Tensor | None


class AttentionOptions(WeightOptions, DropoutOptions, total=False):
    """Options of the attention weights and of dropout."""


class ScoreOptions(TypedDict, total=False):
    """Options of the logits, for all forms of attention to chosen keys."""

    scale: float | None
    softcap: float


class SinkOptions(ScoreOptions, total=False):
    """Options of the logits, and sinks."""

    sinks: Tensor | None


class HeadOptions(SinkOptions, total=False):
    """Options of the logits, sinks and a factor per head."""

    head_scale: Tensor | None


class FormOptions(ScoreOptions, DropoutOptions, total=False):
    """Options of a form of attention to chosen keys, such as `longformer_attention`."""


class ForgettingOptions(FormOptions, total=False):
    """Options of `forgetting_attention`."""

    window_size: tuple[int, int]
    mask: Tensor | EncodedMask | MaskMod | None


class StickBreakingOptions(FormOptions, total=False):
    """Options of `stick_breaking_attention`."""

    window_size: tuple[int, int]
    mask: Tensor | EncodedMask | MaskMod | None


class SoftpickOptions(FormOptions, total=False):
    """Options of `softpick_attention`."""

    causal: bool
    window_size: tuple[int, int]
    mask: Tensor | EncodedMask | MaskMod | None
    bias: Tensor | None
    alibi_slopes: Tensor | None


class SelectedOptions(SinkOptions, DropoutOptions, total=False):
    """Options of `selected_attention`."""


class SelectiveOptions(HeadOptions, DropoutOptions, total=False):
    """Options of `selective_attention`."""


class Options(NamedTuple):
    """Options of a call; plain values come first."""

    window_size: tuple[int, int] = (-1, -1)
    causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    normalizer: Normalizer = "softmax"
    dropout_p: float = 0.0
    mask: Tensor | EncodedMask | MaskMod | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative: EncodedTerm | None = None
    relative_keys: EncodedRows | None = None
    relative_queries: EncodedRows | None = None
    sinks: Tensor | None = None
    head_scale: Tensor | None = None
    score_mod: ScoreMod | PairMod | None = None
    seed: Tensor | None = None


#: Number of options that are plain values.
PLAIN_OPTIONS = Options._fields.index("mask")


def break_stick(s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights of logits s (..., Tk) and the logarithm (...) of what they leave.

    From the last key to the first, each takes the share sigmoid(s) of what later keys left.
    """
    left = torch.nn.functional.logsigmoid(-s)
    later = torch.nn.functional.pad(left[..., 1:], (0, min(1, s.shape[-1])))
    later = later.flip(-1).cumsum(-1).flip(-1)
    return torch.sigmoid(s) * later.exp(), left.sum(-1)


def pick(s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns softpick's weights of logits s (..., Tk) and ``ln sum |e^s - 1|`` (...).

    Rows whose logits are all 0 or -inf have weights of 0 and -inf.
    """
    top = torch.nn.functional.pad(s.detach(), (0, 1)).amax(-1, keepdim=True)
    # e^(s - top) - e^-top, with the relative precision of s near 0
    powers = torch.tanh(s / 2) * (torch.exp(s - top) + torch.exp(-top))
    total = powers.abs().masked_fill(s == -math.inf, 0).sum(-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    lse = (top + total.log()).masked_fill(nothing, -math.inf)
    return torch.relu(powers) / total, lse.squeeze(-1)


def transform_of(options: Options) -> tuple[str, float] | None:
    """Returns the option that transforms the scores and its c, or None."""
    found: tuple[str, float] | None = None
    for name in TRANSFORMS:
        c: float = getattr(options, name)
        if c > 0 and found is not None:
            given = f"{found[0]}={found[1]}, {name}={c}"
            raise ValueError(f"attention: the scores may have one transform, got {given}")
        if c > 0:
            found = name, c
    return found


#: Advice for an unknown option that names padding.
_PADDING = " masks.KeyPadding(real) hides padding; real (B, Tk) is True for real keys"


def pack(op: str, options: Mapping[str, object], names: type = AttentionOptions) -> Options:
    """Packs the options of a call of `op`, which accepts the options that `names` annotates."""
    if not options:
        return DEFAULTS
    given: Mapping[str, Any] = options
    if not given.keys() <= names.__annotations__.keys():
        given = present_names(op, given)
    if not given.keys() <= names.__annotations__.keys():
        raise records.unexpected(op, given, names.__annotations__, {"padding": _PADDING})
    packed = Options(**given)
    return packed if packed.mask is None else _with_mask_mod(packed)


DEFAULTS = Options()


def _with_mask_mod(options: Options) -> Options:
    """Moves a mask function into score_mod."""
    mask, score_mod = options.mask, options.score_mod
    kind: Any = mask
    if isinstance(kind, type) and issubclass(kind, EncodedMask):
        raise TypeError(f"mask must be an instance of {kind.__name__}, got the class; call it")
    if isinstance(mask, (Tensor, EncodedMask)) or not callable(mask):
        return options
    assert not isinstance(score_mod, PairMod)
    return options._replace(mask=None, score_mod=masked_by(mask, score_mod))


def _seen(mask: MaskMod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Calls the mask function for a pair and requires a bool result."""
    try:
        seen = mask(b, h, q, k)
    except TypeError:
        _require_arguments(mask)
        raise
    if getattr(seen, "dtype", None) != torch.bool:
        raise TypeError(f"mask must be a function that gives bool tensors, got {seen!r}")
    return seen


def _require_arguments(mask: MaskMod) -> None:
    try:
        inspect.signature(mask).bind(*"bhqk")
    except TypeError as error:
        raise TypeError(f"mask must be a function of (b, h, q, k): {error}") from None
    except ValueError:  # a builtin without a signature
        pass


def masked_by(mask: MaskMod, score_mod: ScoreMod | None) -> ScoreMod:
    """Returns a score_mod that gives -inf where the mask is False, else score_mod's result."""

    def masked(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, q, k)
        return torch.where(_seen(mask, b, h, q, k), score, -math.inf)

    return masked


def spelled_out(names: type, last: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Makes help() show the options of a function, with their defaults."""
    return records.spelled_out(names, Options, last=last)
