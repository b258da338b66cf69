"""Baselines of the benchmarks: what users of torch run today, with the signatures of our ops.

A provider raises NotImplementedError for an option that it lacks. "aten" is torch's best eager
form, "math" its unfused attention, "hf" a formula of Hugging Face transformers (eager), "compiled"
torch.compile of the eager form, "flex" compiled flex_attention, "grouped" torch's grouped product.
"""

from __future__ import annotations

from collections.abc import Mapping

from baselines import attention, ffn, loss, moe, norm, rope, topk
from baselines._common import Function
from omniattn import reference

__all__ = ["BASELINES", "ON_GPU", "Function"]

#: Functions by op and provider; the eager form comes first.
BASELINES: Mapping[str, Mapping[str, Function]] = {
    **attention.BASELINES,
    **norm.BASELINES,
    **rope.BASELINES,
    **ffn.BASELINES,
    **loss.BASELINES,
    **moe.BASELINES,
    **topk.BASELINES,
    # Torch draws other bits.
    "dropout": {"eager": reference.dropout},
    "uniform_like": {"eager": reference.uniform_like},
}
#: The same on a GPU.
ON_GPU: Mapping[str, Mapping[str, Function]] = BASELINES | attention.ON_GPU
