"""Whole systems as rows of run.py."""
