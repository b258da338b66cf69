"""Finds the layers of a model that this package computes, and replaces them."""
