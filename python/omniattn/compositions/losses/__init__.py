"""Losses with probabilities as targets."""
