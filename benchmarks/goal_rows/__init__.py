"""Rows of goals.py: calls and the yardsticks they are compared with."""
