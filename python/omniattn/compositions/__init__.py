"""Algorithms composed of torch's ops and this package's."""
