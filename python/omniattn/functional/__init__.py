"""Public functions: they check arguments and call the native ops, or on request the reference."""

from omniattn.functional.norm import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
