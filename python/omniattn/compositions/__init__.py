"""Algorithms made of torch's ops and this package's.

Those that are kernels of ops are registered by their import.
"""

from omniattn.compositions import ffn as ffn
from omniattn.compositions import gemm as gemm
from omniattn.compositions import loss as loss
