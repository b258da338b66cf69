"""A small Llama of transformers with a tokenizer of bytes, for pages that take a model as given."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def small_model():
    """Random weights; the tokenizer needs no download."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE({c: i for i, c in enumerate([*letters, "</s>"])}, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="</s>", pad_token="</s>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=len(tokenizer))
    return LlamaForCausalLM(config), tokenizer
