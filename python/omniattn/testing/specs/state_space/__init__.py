"""State-space models: S4, S4D, selective scans and SSD."""
