"""Packed sequences in patched models with recurrent layers: as each sequence alone."""

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import small_models
from patched_models import RECURRENT
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from transformers import DataCollatorWithFlattening, DynamicCache

import omniattn.hf
from omniattn.hf.recurrent.recurrent import _MAKERS

#: Lengths of the sequences in two rows.
SIZES = [[3, 9, 1, 4], [6, 11]]
#: Types that cannot tell sequences apart.
MIXING = ("recurrent_gemma", "rwkv")
OTHERS = (
    "bailing_hybrid",
    "glm5_next_text",
    "inkling_text",
    "lara_mini",
    "lfm3",
    "qwen3_5",
    "qwen4_exp_text",
)


def made(kind: str) -> nn.Module:
    """A small model in training, where mixers choose other paths than in evaluation."""
    torch.manual_seed(0)
    model = small_models.make(kind).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def patched(model: nn.Module, **options: bool) -> nn.Module:
    other = copy.deepcopy(model)
    omniattn.hf.patch(other, linear_cross_entropy=False, **options)
    return other


def tokens(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 90, (rows, sum(SIZES[0])), generator=generator)


def positions(sizes: list[list[int]] = SIZES, first: int = 0) -> Tensor:
    rows = [torch.cat([torch.arange(first, first + n) for n in row]) for row in sizes]
    return torch.stack(rows)


def run(model: nn.Module, ids: Tensor, **options) -> Tensor:
    output = model(input_ids=ids, **options)
    return output.logits if "logits" in output else output.last_hidden_state


def alone(model: nn.Module, ids: Tensor) -> Tensor:
    """Each sequence in a call of its own."""
    rows = [
        torch.cat([run(model, part, use_cache=False) for part in row[None].split(sizes, 1)], 1)
        for row, sizes in zip(ids, SIZES, strict=False)
    ]
    return torch.cat(rows)


def gradients(model: nn.Module, y: Tensor) -> dict[str, Tensor]:
    leaves = dict(model.named_parameters())
    found = torch.autograd.grad(y.square().mean(), list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        bound = 2e-4 * grad.abs().max().item() + 1e-7
        torch.testing.assert_close(actual[name], grad, rtol=1e-3, atol=bound)


@pytest.mark.parametrize("kind", sorted({*RECURRENT, *OTHERS} - {*MIXING}))
def test_sequences_stay_apart(kind):
    model, ids = made(kind), tokens()
    ours, expected = patched(model), alone(model, ids)
    y = run(ours, ids, position_ids=positions())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert_equal(gradients(ours, y), gradients(model, expected))
    with torch.no_grad():  # theirs mixes: a test of rows that could not leak would show nothing
        assert (
            run(model, ids, position_ids=positions(), use_cache=False) - expected
        ).abs().max() > 0.01


def flattened(ids: Tensor) -> dict[str, Tensor]:
    parts = [{"input_ids": part.tolist()} for part in ids[0].split(SIZES[0])]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    given = collate(parts, return_tensors="pt")
    return {name: x for name, x in given.items() if name not in ("input_ids", "labels")}


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "granitemoehybrid", "mamba2", "zamba", "inkling_text"]
)
def test_all_that_collators_pass(kind):
    """TRL's collator for packing and padding_free passes these, too."""
    model, ids = made(kind), tokens(1)
    ours, expected = patched(model), alone(model, ids)
    given = flattened(ids)
    cu = {name: x for name, x in given.items() if "_q" in name or "_k" in name}
    for each in (
        given,
        given | {"use_cache": False},
        {"position_ids": positions()[:1]},
        {"position_ids": positions(first=2)[:1]},
        {"position_ids": given["position_ids"], "seq_idx": given["seq_idx"]},
        {"seq_idx": given["seq_idx"]},
        cu,
    ):
        shifted = each.get("position_ids", torch.zeros(1, 1))[0, 0] == 2
        bound = 1e-3 if shifted else 1e-4  # rotary angles differ, of which only differences count
        torch.testing.assert_close(run(ours, ids, **each), expected, rtol=bound, atol=bound)


def test_evaluation_with_and_without_a_padding_mask():
    model, ids = made("qwen3_next").eval(), tokens()
    ours, expected = patched(model), alone(model, ids)
    output = ours(ids, position_ids=positions())
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    assert output.past_key_values is None
    # With a padding mask, positions count within padded rows, as for attention.
    given = {"position_ids": positions(), "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(
        run(ours, ids, **given, use_cache=False),
        run(model, ids, **given, use_cache=False),
        rtol=1e-4,
        atol=1e-4,
    )


def test_text_positions_before_those_of_time_height_and_width():
    """transformers' masks read boundaries of packed sequences from four rows, not from three."""
    model, ids = made("qwen3_5").eval(), tokens()
    ours, expected = patched(model), alone(model, ids)
    rows = positions().expand(4, -1, -1)
    torch.testing.assert_close(run(ours, ids, position_ids=rows), expected, rtol=1e-4, atol=1e-4)
    for three in (rows[1:], rows[:1]):
        error = (
            r"\(4, B, T\), text positions first.* row 0 of the batch starts a sequence at token 3"
        )
        with pytest.raises(ValueError, match=error):
            ours(ids, position_ids=three, use_cache=False)
    singles = positions([[1, 16], [17]]).expand(3, -1, -1)  # 0, 0, 1, ...: time does not decrease
    with pytest.raises(ValueError, match="starts a sequence at token 1"):
        ours(ids, position_ids=singles, use_cache=False)
    # Marked boundaries agree with the positions.
    marks = positions().eq(0).cumsum(1)
    y = run(ours, ids, position_ids=rows[1:], seq_idx=marks, use_cache=False)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    # An image of 2 x 4 patches after three words, then words from the largest position on.
    patch = torch.arange(8)
    image = 3 + torch.stack([0 * patch, patch // 4, patch % 4])
    words = torch.arange(3).expand(3, -1), torch.arange(7, 13).expand(3, -1)
    one = torch.cat([words[0], image, words[1]], 1)[:, None].expand(-1, 2, -1)
    for given in ({}, {"attention_mask": torch.ones_like(ids)}):
        torch.testing.assert_close(
            run(ours, ids, position_ids=one, **given, use_cache=False),
            run(model, ids, position_ids=one, **given, use_cache=False),
            rtol=1e-4,
            atol=1e-4,
        )
    run(ours, ids, position_ids=rows[1:], attention_mask=torch.ones_like(ids), use_cache=False)


def test_what_cannot_keep_them_apart_raises():
    ids, given = tokens(1), {"position_ids": positions()[:1]}
    for kind in MIXING:
        with pytest.raises(NotImplementedError, match="takes no packed sequences, as"):
            patched(made(kind))(ids, **given)
    model = made("granitemoehybrid")
    ours, without = patched(model), patched(model, attention=False)
    with pytest.raises(NotImplementedError, match="gets a mask that does not keep"):
        without(ids, **given)
    cache = DynamicCache(config=model.config)
    for options in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="use_cache=False and without a cache"):
            ours(ids, **given, **options)
    bounds = torch.tensor([0, 3, ids.shape[1] - 1])
    with pytest.raises(ValueError, match="cu_seq_lens_q must grow from 0 to the number of tokens"):
        ours(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match=r"seq_idx must have shape \(B, T\)"):
        ours(ids, seq_idx=torch.zeros(1, 3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "granitemoehybrid"])
def test_recomputed_layers(kind, reentrant):
    model, ids = made(kind), tokens()
    expected = gradients(model, alone(model, ids))
    ours = patched(model)
    options = {"use_reentrant": reentrant}
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    ours.enable_input_require_grads()
    run(ours, ids, position_ids=positions()).square().mean().backward()
    leaves = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert_equal(leaves, expected)


def test_wrappers_that_recompute_raise():
    ours, ids = patched(made("mamba")), tokens()
    checkpoint_wrapper.apply_activation_checkpointing(
        ours, check_fn=lambda module: type(module).__name__ == "MambaBlock"
    )
    y = run(ours, ids, position_ids=positions())
    with pytest.raises(RuntimeError, match=r"call model\.gradient_checkpointing_enable"):
        y.sum().backward()


@pytest.mark.parametrize("what", ["model", "layers"])
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("lfm3", "eager"), pytest.param("qwen3_next", "aot_eager", marks=pytest.mark.slow)],
)
def test_compiled(kind, backend, what):
    """Calls with and without packed sequences do not run each other's graphs."""
    model, ids = made(kind), tokens()
    ours, expected, plain = patched(model), alone(model, ids), run(model, ids, use_cache=False)
    if what == "model":
        compiled = torch.compile(ours, backend=backend, fullgraph=True)
    else:
        compiled = ours
        for layer in ours.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        y = run(compiled, ids, use_cache=False)
        torch.testing.assert_close(y, plain, rtol=1e-4, atol=1e-4)
        y = run(compiled, ids, position_ids=positions(), use_cache=False)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert_equal(gradients(ours, y), gradients(model, expected))


def test_compiled_with_what_packed_sequences_exclude():
    """A graph does not know whether positions separate sequences: it tells when it runs."""
    ids, one = tokens(), torch.arange(sum(SIZES[0])).expand(2, -1)
    model = made("lfm3").eval()
    compiled = torch.compile(patched(model), backend="eager")
    with torch.no_grad():
        output = compiled(ids, position_ids=one, use_cache=True)
        expected = model(ids, position_ids=one, use_cache=True)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert output.past_key_values.get_seq_length() == ids.shape[1]
        with pytest.raises(RuntimeError, match="use_cache=False and without a cache"):
            compiled(ids, position_ids=positions(), use_cache=True)
        bounds = torch.tensor([0, 3, ids.shape[1] - 1])
        with pytest.raises(RuntimeError, match="cu_seq_lens_q must grow from 0 to the number of"):
            compiled(ids[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False)


def test_threads_and_pickles():
    model, ids = made("lfm3"), tokens()
    ours = pickle.loads(pickle.dumps(patched(model)))
    rows = [positions(), torch.arange(ids.shape[1])[None].expand(2, -1)]
    expected = [alone(model, ids), run(model, ids, use_cache=False)]
    found: list[Tensor | None] = [None, None]

    def call(i: int) -> None:
        for _ in range(5):
            found[i] = run(ours, ids, position_ids=rows[i], use_cache=False)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y, want in zip(found, expected, strict=True):
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    omniattn.hf.unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


FUNCTIONS = {
    "causal_conv1d_fn": ([(1, 6, 17), (6, 4)], 2, {}),
    "mamba_selective_scan": ([(1, 6, 17)] * 2 + [(6, 4)] + [(1, 4, 17)] * 2, 2, {}),
    "mamba2_chunk_scan": (
        [(1, 17, 4, 3), (1, 17, 4), (4,), (1, 17, 2, 5), (1, 17, 2, 5)],
        1,
        {"chunk_size": 8, "dt_softplus": True},
    ),
    "torch_chunk_gated_delta_rule": ([(1, 17, 2, 4)] * 3 + [(1, 17, 2)] * 2, 1, {}),
    "chunk_kimi_delta_attention": ([(1, 17, 2, 4)] * 4 + [(1, 17, 2)], 1, {}),
}


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_layers_that_are_called_alone(function, name):
    """A layer outside a model gets the packing keywords itself."""
    shapes, dim, options = FUNCTIONS[function]
    generator = torch.Generator().manual_seed(0)
    given = [-torch.rand(shape, generator=generator) for shape in shapes]

    def theirs(*args, **kwargs):
        raise AssertionError("theirs must not run")

    ours = _MAKERS[function](theirs)
    sizes = SIZES[0]
    marks = {
        "seq_idx": torch.arange(4).repeat_interleave(torch.tensor(sizes))[None].int(),
        "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0).int(),
    }

    def first(y: Tensor | tuple[Tensor, ...]) -> Tensor:
        return y[0] if isinstance(y, tuple) else y

    y = first(ours(*given, **options, **{name: marks[name]}))
    parts = zip(
        *(t.split(sizes, dim) if t.ndim > 2 and t.shape[dim] == 17 else [t] * 4 for t in given),
        strict=True,
    )
    wanted = torch.cat([first(ours(*part, **options)) for part in parts], dim)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_functions_elsewhere_refuse_what_theirs_would_mix():
    ours = _MAKERS["causal_conv1d_fn"](lambda *args, **options: None)
    x, weight = torch.ones(1, 6, 5), torch.ones(6, 4)
    with pytest.raises(NotImplementedError, match="to keep packed sequences apart"):
        ours(x, weight, activation="gelu", cu_seq_lens_q=torch.tensor([0, 2, 5]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize(
    "how", [{"packing": True, "max_length": 24}, {"padding_free": True, "max_length": None}]
)
def test_trl(kind, how, tmp_path):
    """Training with TRL, without the packages that transformers' own layers need for it."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[EOS]": 1} | {f"w{i}": i for i in range(2, 90)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")
    texts = [" ".join(f"w{2 + (7 * i + j) % 80}" for j in range(3 + i % 9)) for i in range(32)]
    arguments = {"per_device_train_batch_size": 4, "max_steps": 3, "report_to": [], "use_cpu": True}
    arguments |= {"bf16": False, "logging_steps": 1, "save_strategy": "no"}
    model = patched(made(kind))
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(tmp_path), **arguments, **how),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=fast,
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
