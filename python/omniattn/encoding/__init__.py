"""Encodes masks and score terms as lists of integers, floats and tensors, which the ops take.

Kinds have the numbers of the enums in csrc/semantics; tests/kernels/test_enums.py compares them.
"""
