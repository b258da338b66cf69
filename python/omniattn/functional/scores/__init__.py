"""Terms of the attention logits, as values that are encoded for the kernels.

A new term read from a table needs a dataclass here, a struct in csrc/semantics/score_rules.h and a
case in encoding/options.py; no schema, fake kernel or gradient changes.
"""

from omniattn.encoding.options import ScoreRule
from omniattn.functional.scores.tables import (
    DistanceBias,
    DistanceRows,
    RelativeBias,
    T5Bias,
    WindowBias,
)

__all__ = ["DistanceBias", "DistanceRows", "RelativeBias", "ScoreRule", "T5Bias", "WindowBias"]
