"""Checks of arguments, and nested and packed batches, for all public functions and layers."""
