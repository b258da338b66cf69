"""Text encoders: the body that they share, and families as data."""
