"""Loads the native libraries and gives their ops fakes and gradients. Use `functional` instead."""

from omniattn.ops.dispatch import level_choice as level_choice
from omniattn.ops.dispatch import library as library
from omniattn.ops.dispatch import torch_kernels as torch_kernels
