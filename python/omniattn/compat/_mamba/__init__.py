"""Functions and modules of `compat.mamba_ssm`."""
