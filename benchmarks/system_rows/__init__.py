"""Rows of run.py for layers and compositions."""
