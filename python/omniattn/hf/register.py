"""Makes attn_implementation="omniattn" known to transformers."""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from omniattn.hf.attention import attention_forward
from omniattn.hf.masks import attention_mask

__all__ = ["register"]


def register(name: str = "omniattn") -> None:
    """Registers the attention and the mask function under `name`.

    Both are needed: without the second a model has no mask at all and silently loses causality.

    Args:
        name: for `from_pretrained(..., attn_implementation=name)`, `from_config` and
            `model.set_attn_implementation(name)`.

    Note:
        A model that computes its attention without transformers' AttentionInterface (BLOOM, MPT,
        Falcon and others) raises NotImplementedError at its first mask. A padded query, which
        attends to nothing, gives 0 where eager gives the mean of all values.

    Example:
        >>> from transformers import AttentionInterface
        >>> register()
        >>> "omniattn" in AttentionInterface()
        True
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
