"""Tells layers of transformers that this package computes, and packed sequences in them."""
