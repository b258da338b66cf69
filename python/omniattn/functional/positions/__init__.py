"""Rotary embeddings, and sinusoidal, ALiBi and grid encodings of positions."""
