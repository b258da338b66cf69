"""Decoders of the Llama family by their names in transformers."""
