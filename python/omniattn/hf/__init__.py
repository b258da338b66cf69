"""Runs Hugging Face transformers on this package's kernels.

import omniattn.hf
omniattn.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="omniattn")
"""

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ImportError(
        "omniattn.hf: needs transformers, which is not installed; "
        "install it with: pip install 'omniattn[hf]'"
    )

from omniattn.functional._keywords import explain_keywords
from omniattn.hf.causal_lm import OmniattnConfig, OmniattnForCausalLM
from omniattn.hf.patching.callback import OmniattnCallback
from omniattn.hf.patching.hub_layers import kernel_mapping
from omniattn.hf.patching.patch import patch, unpatch
from omniattn.hf.patching.register import register

__all__ = [
    "OmniattnCallback",
    "OmniattnConfig",
    "OmniattnForCausalLM",
    "kernel_mapping",
    "patch",
    "register",
    "unpatch",
]

explain_keywords(__name__, __all__)
