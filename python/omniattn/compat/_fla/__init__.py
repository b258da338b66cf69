"""Functions and modules of `compat.fla`, by families."""
