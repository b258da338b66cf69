"""Loads the native libraries, and tells which kernels, fakes and gradients a call gets."""
