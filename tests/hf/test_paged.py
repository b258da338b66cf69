"""Continuous batching of transformers on this package's attention."""

import pytest
import torch
import transformers as hf
from eager_models import DECODER, DECODERS, WINDOW, pair

MODELS = {
    "llama": DECODERS["llama"],
    "qwen2": DECODERS["qwen2"],
    "gpt_oss": DECODERS["gpt_oss"],
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, **WINDOW, head_dim=12)),
}
GREEDY = hf.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
#: Prompts that do not fit into one batch, so that one is read in several parts.
SMALL = hf.ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=16)


def generate(model, prompts: list[list[int]]) -> list[list[int]]:
    found = model.generate_batch(
        prompts, generation_config=GREEDY, continuous_batching_config=SMALL, progress_bar=False
    )
    return [found[name].generated_tokens for name in sorted(found)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_paged_eager_attention(name):
    eager, ours = pair(MODELS[name])
    eager.set_attn_implementation("paged|eager")
    prompts = [torch.randint(3, 97, (n,)).tolist() for n in (7, 3, 21, 5)]
    expected = generate(eager, prompts)
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert generate(ours, prompts) == expected
    assert ours.config._attn_implementation == "omniattn"


@pytest.mark.filterwarnings("ignore:The `paged|` prefix")
def test_the_name_with_a_prefix_is_taken():
    _, ours = pair(MODELS["llama"])
    ours.set_attn_implementation("paged|omniattn")
    assert ours.config._attn_implementation == "omniattn"
    with pytest.raises(NotImplementedError, match="BloomAttention"):
        config = hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)
        hf.BloomForCausalLM(config).set_attn_implementation("paged|omniattn")


def test_what_continuous_batching_does_not_know_is_still_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        generate(model, [[5, 6]])
