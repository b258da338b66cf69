"""Key-value caches."""
