"""Rows of goals.py: calls and their yardsticks."""
