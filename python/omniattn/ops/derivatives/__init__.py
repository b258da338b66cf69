"""Definitions in pieces and tangents of ops, for derivatives of higher orders."""
