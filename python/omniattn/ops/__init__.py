"""Loads the native libraries and gives their ops fakes and gradients. Use `functional` instead."""

from omniattn.ops import _library as _library
from omniattn.ops import level_choice as level_choice
