"""The rows of the OpSpec registry, a file for each family."""
