"""Algorithms made of torch's ops and this package's.

Importing a module registers its functions that serve as kernels of ops.
"""

from omniattn.compositions import indexer_loss as indexer_loss
from omniattn.compositions import loss as loss
