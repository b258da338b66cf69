"""Models and calls beyond one process, on torch.distributed."""

from omniattn.distributed.context import context_parallel, context_parallel_unshard
from omniattn.distributed.experts import expert_parallel
from omniattn.distributed.pipeline import pipeline_parallel
from omniattn.distributed.tensor import tensor_parallel, vocabulary_parallel_cross_entropy

__all__ = [
    "context_parallel",
    "context_parallel_unshard",
    "expert_parallel",
    "pipeline_parallel",
    "tensor_parallel",
    "vocabulary_parallel_cross_entropy",
]
