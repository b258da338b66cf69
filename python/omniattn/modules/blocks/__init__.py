"""Blocks of layers: a decoder block, multi-token prediction."""
