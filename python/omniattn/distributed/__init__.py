"""Models and calls beyond one process, on torch.distributed."""

from omniattn.distributed.context import context_parallel, context_parallel_unshard

__all__ = ["context_parallel", "context_parallel_unshard"]
