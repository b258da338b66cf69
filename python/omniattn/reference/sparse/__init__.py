"""Sparse attention: patterns, selected blocks and tokens, indexers."""
