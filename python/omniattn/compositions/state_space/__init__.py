"""State-space models: the inputs of Mamba-3."""
