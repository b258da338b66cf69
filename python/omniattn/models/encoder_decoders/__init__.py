"""The encoder-decoder, and families of it."""
