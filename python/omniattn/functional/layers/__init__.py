"""Norms, activations, feed-forward layers, experts, products, top-k and dropout."""
