"""Tensor parallelism: layers and decoders whose weights are split over ranks."""

from omniattn.distributed.tensor.model import tensor_parallel
from omniattn.distributed.tensor.vocabulary import vocabulary_parallel_cross_entropy

__all__ = ["tensor_parallel", "vocabulary_parallel_cross_entropy"]
