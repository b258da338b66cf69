"""Attention to chosen keys: patterns, selected blocks and tokens, indexers."""
