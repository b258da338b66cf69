"""Layers on grids of patches."""
