"""Makes attn_implementation="omniattn" and experts_implementation="omniattn" known."""

from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from omniattn.hf.attention import attention_forward
from omniattn.hf.experts import experts_forward
from omniattn.hf.masks import attention_mask

__all__ = ["register"]


def register(name: str = "omniattn") -> None:
    """Registers attention, masks and experts under `name`.

    Attention needs the mask function: without it a model has no mask at all and silently loses
    causality.

    Args:
        name: for `from_pretrained(..., attn_implementation=name, experts_implementation=name)`,
            `from_config`, `model.set_attn_implementation(name)` and
            `model.set_experts_implementation(name)`.

    Note:
        A model that computes its attention without transformers' AttentionInterface does not load:
        NotImplementedError at its first mask (BLOOM, MPT), or transformers' own KeyError (Falcon,
        GPT-J); its `set_attn_implementation` warns and changes nothing. A layer that passes what is
        not computed here, such as the chosen indices of DeepSeek-V3.2 or the compressed keys of V4,
        raises NotImplementedError. A padded query, which attends to nothing, gives 0 where eager
        gives the mean of all values.

    Example:
        >>> from transformers import AttentionInterface
        >>> register()
        >>> "omniattn" in AttentionInterface()
        True
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
