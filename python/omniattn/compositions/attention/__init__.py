"""Attention whose weights or logits no kernel computes on all devices, by blocks of tokens."""
