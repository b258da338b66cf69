"""Layers of sparse attention."""
