"""The mask function: every rule it makes of a predicate is that predicate, and unknowns say so."""

import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils as mu

from omniattn.encoding.masks import Sizes, visible
from omniattn.functional import masks
from omniattn.hf.attention.attention import UNSUPPORTED, attention_forward
from omniattn.hf.attention.masks import RuleMask, attention_mask

BATCH, LENGTH = 3, 12
PACKED = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] * 2 + [1] * 3 + [2] * 7])
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(2), *range(3), *range(7)]])

PREDICATES = {
    "causal": mu.causal_mask_function,
    "bidirectional": mu.bidirectional_mask_function,
    "window": mu.sliding_window_causal_mask_function(4),
    "chunked": mu.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64)),
    "two-sided": mu.sliding_window_bidirectional_mask_function(3),
}


def paddings() -> dict[str, torch.Tensor | None]:
    lengths = torch.tensor([12, 7, 0])[:, None]
    right = torch.arange(LENGTH) < lengths
    return {
        "none": None,
        "full": torch.ones(BATCH, LENGTH, dtype=torch.bool),
        "right": right,
        "left": right.flip(1),
        "holes": torch.rand(BATCH, LENGTH) < 0.6,
    }


def as_dense(mask: RuleMask) -> torch.Tensor:
    """The rules as the kernels apply them, to the first `keys` keys."""
    seen = visible(mask.rules.rules(), Sizes(mask.shape[2], mask.keys, mask.device))
    full = torch.zeros(mask.shape, dtype=torch.bool)
    full[..., : mask.keys] = True if seen is None else seen
    return full


def is_recognised(mask: RuleMask) -> bool:
    return not any(isinstance(rule, masks.BoolMask) for rule in mask.rules.masks)


@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [
        (12, 12, 0, 0),
        (1, 12, 11, 0),  # decoding
        (5, 12, 7, 0),  # chunked prefill
        (5, 12, 0, 0),  # prefill into a static cache
        (1, 12, torch.tensor(4), 0),  # decoding in a static cache
        (2, 8, 10, 4),  # rolling window cache
        (4, 9, 1, 2),
    ],
)
def test_rules_are_the_predicate(name, q_length, kv_length, q_offset, kv_offset):
    recognised = 0
    for padding in paddings().values():
        arguments = {
            "batch_size": BATCH,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": PREDICATES[name],
            "attention_mask": padding,
        }
        expected = mu.sdpa_mask(**arguments, allow_is_causal_skip=False)
        mask = attention_mask(**arguments, dtype=torch.float64, config=transformers.LlamaConfig())
        assert mask.shape == expected.shape
        assert torch.equal(as_dense(mask), expected)
        recognised += is_recognised(mask)
        assert torch.equal(mask & True, expected)  # what a model that combines masks sees
    unaligned = name == "two-sided" and q_offset + q_length != kv_offset + kv_length
    if not unaligned and not (name == "chunked" and kv_offset):
        assert recognised == len(paddings())


def packed(predicate, last: bool = True):
    """As transformers combines them: which sequence, first until 5.23 and last since 5.24."""
    parts = [mu.remap_positions_for_packed_sequence(predicate, POSITIONS)]
    parts.insert(int(last), mu.packed_sequence_mask_function(PACKED))
    return mu.and_masks(*parts)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_packed_sequences_are_rules(name, last):
    predicate = packed(PREDICATES[name], last)
    mask = attention_mask(BATCH, LENGTH, LENGTH, mask_function=predicate)
    expected = mu.sdpa_mask(
        BATCH, LENGTH, LENGTH, mask_function=predicate, allow_is_causal_skip=False
    )
    assert is_recognised(mask)
    assert torch.equal(as_dense(mask), expected)


def test_position_ids_name_the_documents_of_transformers():
    positions = torch.randint(0, 3, (50, 40)).cumsum(-1) % 7
    expected = mu.find_packed_sequence_indices(positions)
    assert torch.equal(masks.Documents.from_position_ids(positions).queries, expected)


@pytest.mark.parametrize(
    "predicate",
    [
        mu.chunked_causal_mask_function(4, torch.tensor([0, 2, 0])),
        mu.and_masks(mu.causal_mask_function, lambda b, h, q, k: (q + k) % 3 > 0),
        mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(PACKED)),
        packed(mu.chunked_causal_mask_function(2, torch.zeros(3))),
        mu.sliding_window_causal_mask_function(0),
    ],
    ids=["chunked", "unknown", "or", "packed-chunked", "window-0"],
)
def test_an_unknown_predicate_becomes_its_dense_mask(predicate):
    mask = attention_mask(BATCH, LENGTH, LENGTH, mask_function=predicate)
    assert not is_recognised(mask)
    expected = mu.sdpa_mask(
        BATCH, LENGTH, LENGTH, mask_function=predicate, allow_is_causal_skip=False
    )
    assert torch.equal(as_dense(mask), expected)


@pytest.mark.parametrize("kind", [transformers.GptOssModel, transformers.LlamaModel])
def test_modules_outside_attention_see_the_mask_that_the_model_knows(kind):
    given = {"attention_mask": paddings()["left"], "dtype": torch.float64}
    mask = attention_mask(BATCH, LENGTH, LENGTH, **given, config=kind.config_class())
    known = mu.sdpa_mask if kind._supports_sdpa else mu.eager_mask
    expected = known(BATCH, LENGTH, LENGTH, **given, allow_is_causal_skip=False)
    assert mask.dtype == expected.dtype
    assert torch.equal(mask.clone(), expected)


class Layer(nn.Module):
    is_causal = True


def inputs(queries: int = 4, keys: int = 4) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)


def test_what_is_not_computed_is_named():
    for name in ("block_table", "k_cache", "cache"):
        with pytest.raises(NotImplementedError, match=f"Layer passes {name}"):
            attention_forward(Layer(), *inputs(), None, **{name: True})
    compressing = Layer()
    compressing.compressor = nn.Identity()  # DeepSeek-V4
    with pytest.raises(NotImplementedError, match="Layer appends compressed keys"):
        attention_forward(compressing, *inputs(), None)
    for name in ("shift_labels", "label_smoothing", "seq_idx", "ignore_index"):  # of losses, mixers
        attention_forward(Layer(), *inputs(), None, output_attentions=False, **{name: inputs()[0]})
    with pytest.raises(ValueError, match="Module must give a mask"):
        attention_forward(nn.Module(), *inputs(), None)
    with pytest.raises(ValueError, match="Tk=5"):
        attention_forward(Layer(), *inputs(4, 5), attention_mask(1, 4, 4))
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(1, 4, 4\)"):
        attention_mask(1, 4, 4, attention_mask=torch.ones(1, 4, 4))


def test_every_keyword_of_attention_is_computed_or_refused():
    """Keywords that the layers of the installed transformers pass to attention by themselves."""
    folder = Path(transformers.__file__).parent
    passed = set()
    for path in folder.glob("models/*/modeling_*.py"):
        for call in re.finditer(
            r"= attention_interface\((.*?)\n +\)\n", path.read_text(), re.DOTALL
        ):
            passed |= set(re.findall(r"^ +(\w+)=", call[1], re.MULTILINE))
    assert {"scaling", "s_aux", "indices"} <= passed
    computed = inspect.signature(attention_forward).parameters.keys()
    # Lengths that the ends of sequences contain, positions that the mask has seen already, and
    # what is so here in any case.
    implied = {"max_length_q", "max_length_k", "position_ids", "deterministic"}
    assert passed <= computed | UNSUPPORTED | implied


def test_a_mask_of_nothing_fits_any_keys():
    """BERT as a decoder without `is_decoder` makes it for the new token alone."""
    q, k, v = inputs(1, 5)
    mask = attention_mask(1, 1, 1, mask_function=mu.bidirectional_mask_function)
    out, _ = attention_forward(Layer(), q, k, v, mask)
    expected = nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_bridgetower_sees_all_keys_without_a_mask():
    module = pytest.importorskip("transformers.models.bridgetower.modeling_bridgetower")
    layer = module.BridgeTowerSelfAttention(
        transformers.BridgeTowerTextConfig(hidden_size=8, num_attention_heads=2), is_causal=True
    )
    q, k, v = inputs(4, 4)
    out, _ = attention_forward(layer.eval(), q, k, v, None)
    expected = nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("queries", [1, 4])
def test_a_mask_of_one_query_is_that_of_all(queries):
    q, k, v = inputs(queries, 5)
    real = torch.tensor([[True, True, True, False, False]])
    mask = attention_mask(
        1, 1, 5, mask_function=mu.bidirectional_mask_function, attention_mask=real
    )
    out, _ = attention_forward(Layer(), q, k, v, mask)
    want = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
    torch.testing.assert_close(out, want.transpose(1, 2))


def test_without_a_mask_the_layer_decides():
    q, k, v = inputs()
    sdpa = nn.functional.scaled_dot_product_attention
    for is_causal, window in itertools.product((True, False), (None, 2)):
        if not is_causal and window is not None:
            continue
        seen = torch.ones(4, 4, dtype=torch.bool)
        seen = seen.tril() if is_causal else seen
        seen = seen if window is None else seen.triu(1 - window)
        out, _ = attention_forward(
            Layer(), q, k, v, None, is_causal=is_causal, sliding_window=window
        )
        torch.testing.assert_close(out.transpose(1, 2), sdpa(q, k, v, attn_mask=seen))
    one, _ = attention_forward(Layer(), q[:, :, :1], k, v, None, sliding_window=2)
    expected = sdpa(q[:, :, :1], k[:, :, 2:], v[:, :, 2:])
    torch.testing.assert_close(one.transpose(1, 2), expected)


def test_custom_four_dimensional_masks_and_packed_lengths():
    q, k, v = inputs(5, 5)
    sdpa = nn.functional.scaled_dot_product_attention
    seen = (torch.rand(1, 1, 5, 5) < 0.5) | torch.eye(5, dtype=torch.bool)
    additive = torch.randn(1, 1, 5, 5)
    bias = torch.randn(1, 2, 5, 5)
    for mask in (seen, additive):
        out, _ = attention_forward(Layer(), q, k, v, mask)
        torch.testing.assert_close(out.transpose(1, 2), sdpa(q, k, v, attn_mask=mask))
    out, _ = attention_forward(Layer(), q, k, v, additive, position_bias=bias)
    torch.testing.assert_close(out.transpose(1, 2), sdpa(q, k, v, attn_mask=bias + additive))

    ends = torch.tensor([0, 2, 5])
    out, _ = attention_forward(
        Layer(), q, k, v, attention_mask(1, 5, 5), cu_seq_lens_q=ends, cu_seq_lens_k=ends
    )
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool().tril()
    torch.testing.assert_close(out.transpose(1, 2), sdpa(q, k, v, attn_mask=blocks))
    with pytest.raises(ValueError, match="must come together"):
        attention_forward(Layer(), q, k, v, attention_mask(1, 5, 5), cu_seq_lens_q=ends)


def test_mask_stays_when_a_static_cache_is_updated():
    """The offset is the cache's own count; Doge and NLLB-MoE read the mask after the update."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 7}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    config._attn_implementation = "omniattn"
    cache, k = transformers.StaticCache(config=config, max_cache_len=6), torch.randn(1, 2, 2, 4)
    cache.update(k, k, 0)
    # By position: transformers 5.24 renames past_key_values to cache.
    mask = mu.create_causal_mask(config, torch.randn(1, 1, 8), None, cache)
    before = mask & True
    cache.update(k[:, :, :1], k[:, :, :1], 0)
    assert torch.equal(mask & True, before)
    assert before.flatten().tolist() == [True] * 3 + [False] * 3
