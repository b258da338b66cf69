"""Loads the native libraries; binds their ops to fakes and autograd. Use `functional` instead."""

from omniattn.ops import _library as _library
from omniattn.ops import level_choice as level_choice
