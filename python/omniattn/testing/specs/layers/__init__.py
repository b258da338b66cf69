"""Norms, activations, feed-forward layers, experts, linear layers, top-k and dropout."""
