"""Softmax attention: dense, packed, cached, as torch's function, and weights alone."""
