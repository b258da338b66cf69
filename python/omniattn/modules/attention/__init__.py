"""Layers of dense attention."""
