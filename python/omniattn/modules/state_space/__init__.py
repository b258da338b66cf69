"""State-space layers: Mamba, S4 and their variants."""
