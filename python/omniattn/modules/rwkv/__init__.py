"""RWKV-4 to RWKV-7."""
