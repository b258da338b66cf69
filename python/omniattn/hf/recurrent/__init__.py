"""Recurrent layers of transformers on this package's kernels."""
