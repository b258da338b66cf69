"""Algorithms made of torch's ops and this package's."""
