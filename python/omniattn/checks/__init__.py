"""Argument checks, and support of nested and packed batches, for all functions and layers."""
