"""Sparse attention layers."""
