"""Settings of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniattn.checks.arguments import require_choice, require_int, shown
from omniattn.modules.base.fields import Fields, Positive, SignedInt, Size
from omniattn.modules.base.layer import check_fields
from omniattn.suggestions import did_you_mean

#: Parts of a report, in its order.
PARTS = ("loss", "decode", "recall", "positions", "norms")
BUDGETS = ("params", "flops")


@dataclass(frozen=True)
class Settings(Fields):
    """Options that, with the models and the data, determine the results.

    Args:
        budget: "params" for equal numbers of parameters, "flops" for equal operations of training.
        size: parameters of each model, or operations per token; None: those of an attention decoder
            of this width and depth.
        dim, layers, heads: largest width, number of layers and of heads.
        steps, batch, length: optimizer steps, sequences and tokens of a sequence, for text.
        recall_steps, recall_length: steps and tokens of the recall tasks.
        norm_steps, norm_layers: steps and depth of the models with other placements of norms.
        decode_lengths: tokens before those whose speed is measured.
        test_lengths: lengths of the test, as multiples of the trained length, for positions.
        ratios: "n:m", n layers of the mixer and m of attention in turn, for hybrids in recall.
        repeats: number of seeds.
        seed: first seed.
        lr: peak learning rate; the last is a tenth of it.
    """

    budget: str = "params"
    size: Size | None = None
    dim: Size = 64
    layers: Size = 4
    heads: Size = 2
    steps: Size = 150
    batch: Size = 8
    length: Size = 128
    recall_steps: Size = 300
    recall_length: Size = 32
    norm_steps: Size = 40
    norm_layers: Size = 8
    decode_lengths: tuple[int, ...] = (128, 512, 2048)
    test_lengths: tuple[int, ...] = (1, 2, 4, 8)
    ratios: tuple[str, ...] = ("3:1", "1:1")
    repeats: Size = 1
    seed: SignedInt = 0
    lr: Positive = 3e-3

    def __post_init__(self) -> None:
        check_fields(self)
        op = "Settings"
        require_choice(op, "budget", self.budget, BUDGETS)
        for name in ("decode_lengths", "test_lengths"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values:
                raise ValueError(f"{op}: {name} must be integers, got {name}={shown(values)}")
            for value in values:
                require_int(op, name, value, 1)
        if 1 not in self.test_lengths:
            raise ValueError(
                f"{op}: test_lengths must have 1, the trained length, "
                f"got test_lengths={self.test_lengths}"
            )
        if self.dim % (4 * self.heads) or self.heads % 2:
            raise ValueError(
                f"{op}: heads must be even and dim a multiple of 4 heads, "
                f"got dim={self.dim}, heads={self.heads}"
            )
        if self.seed < 0:
            raise ValueError(f"{op}: seed must be >= 0, got seed={self.seed}")

    @property
    def seeds(self) -> range:
        """Seeds of the repeats."""
        return range(self.seed, self.seed + self.repeats)


def require_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """Returns parts of a report in its order."""
    if isinstance(parts, str):
        raise TypeError(f"compare: parts must be a list, got parts={shown(parts)}")
    for part in parts:
        if part not in PARTS:
            raise ValueError(
                f"compare: parts must be among {', '.join(PARTS)}, "
                f"got {shown(part)}{did_you_mean(part, PARTS)}"
            )
    if not parts:
        raise ValueError("compare: parts must not be empty")
    return tuple(part for part in PARTS if part in parts)
