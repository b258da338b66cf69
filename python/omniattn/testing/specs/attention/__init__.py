"""Softmax attention: dense, packed, cached, torch's SDPA interface, and attention weights."""
