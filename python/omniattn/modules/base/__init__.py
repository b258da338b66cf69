"""Base classes and the parts that layers share: linear, norms, MLPs, states, positions."""
