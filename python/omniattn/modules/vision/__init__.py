"""Layers for images: grids of patches."""
