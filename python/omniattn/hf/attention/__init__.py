"""Attention layers and masks of transformers on this package's kernels."""
