"""Hugging Face transformers on this package's kernels.

import omniattn.hf
omniattn.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="omniattn")
"""

from omniattn.hf.hub_layers import kernel_mapping
from omniattn.hf.patch import patch, unpatch
from omniattn.hf.register import register

__all__ = ["kernel_mapping", "patch", "register", "unpatch"]
