"""Masks and score terms as lists of integers, floats and tensors, which the ops take.

The numbers equal the enums of csrc/semantics; tests/kernels/test_enums.py compares them.
"""
