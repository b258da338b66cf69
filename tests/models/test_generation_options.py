"""Beams, penalties, endings, streams and drafts of generation."""

import copy
from dataclasses import replace

import pytest
import torch

from omniattn import testing
from omniattn.models import PRESETS, DeepSeekConfig, LlamaConfig, T5Config, generate, sample, stream

PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 9}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny models: opening the thread pool would cost more than the work."""
    with testing.threads(1):
        yield


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarges the weights, so that the distributions of a random model are far from uniform."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(4)
    return model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=37, dim=48, num_layers=2, num_heads=4, hidden_dim=96)
    return spread(config.build(dtype=torch.float64))


@pytest.fixture(scope="module")
def theirs(model):
    pytest.importorskip("transformers")
    return model.to_hf().double().eval()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(37, (3, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping"),
    [(2, 1.0, False), (5, 0.0, False), (5, 2.0, True), (3, -1.5, False)],
)
def test_beams_are_those_of_transformers(
    model, theirs, prompt, num_beams, length_penalty, early_stopping
):
    options = {"num_beams": num_beams, "length_penalty": length_penalty}
    options["early_stopping"] = early_stopping
    for eos in ((), (4,), tuple(range(0, 36, 3))):
        last = list(eos) or None
        wanted = theirs.generate(prompt, **(PLAIN | options | {"eos_token_id": last}))
        out = generate(model, prompt, 9, eos=last, **options)
        if eos:  # transformers pads; here a row repeats its last token
            ended = (torch.isin(wanted[:, 5:], torch.tensor(eos)).cumsum(-1) > 0).long()
            after = torch.cat([torch.zeros(3, 5), torch.cumsum(ended, -1) > 1], 1).bool()
            assert torch.equal(out.masked_fill(after, 0), wanted.masked_fill(after, 0))
        else:
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_repetition_penalty_is_that_of_transformers(model, theirs, prompt, num_beams):
    options = {"repetition_penalty": 1.7, "num_beams": num_beams}
    wanted = theirs.generate(prompt, **PLAIN, **options)
    out = generate(model, prompt, 9, **options)
    assert torch.equal(out, wanted)
    assert not torch.equal(out, generate(model, prompt, 9, num_beams=num_beams))


def test_beams_of_an_encoder_and_decoder():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = spread(T5Config(vocab_size=37, dim=32, num_layers=2, hidden_dim=64).build())
    source, start = torch.randint(1, 37, (2, 6)), torch.zeros(2, 1, dtype=torch.long)
    theirs = model.to_hf().eval()
    wanted = theirs.generate(source, **PLAIN, num_beams=4, decoder_start_token_id=0)
    assert torch.equal(generate(model, start, 9, source=source, num_beams=4), wanted)


@pytest.mark.parametrize("name", ["mamba", "gated-deltanet", "rwkv7"])
def test_beams_take_recurrent_states_along(name):
    """The best of as many beams as tokens is the most probable pair of tokens."""
    torch.manual_seed(0)
    model = spread(replace(PRESETS[name], vocab_size=11).build(dtype=torch.float64)).eval()
    prompt = torch.randint(11, (2, 4))
    out = generate(model, prompt, 2, num_beams=11)
    pairs = torch.cartesian_prod(torch.arange(11), torch.arange(11))
    with torch.no_grad():
        for row in range(2):
            all_pairs = torch.cat([prompt[row].expand(121, -1), pairs], 1)
            log_p = model(all_pairs[:, :-1])[:, -2:].log_softmax(-1)
            best = log_p.gather(-1, pairs[..., None]).sum((1, 2)).argmax()
            assert torch.equal(out[row, 4:], pairs[best])


def test_min_p_keeps_tokens_near_the_most_probable_one():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0]])
    uniform = (torch.arange(4000) + 0.5) / 4000
    found = sample(logits.expand(4000, -1), uniform, min_p=0.2)
    p = logits[0].softmax(-1)
    p = torch.where(p >= 0.2 * p.max(), p, 0)
    counts = torch.bincount(found, minlength=5) / 4000
    torch.testing.assert_close(counts, p / p.sum(), rtol=0, atol=1e-3)


def test_a_row_ends_after_a_stop_sequence(model, prompt):
    free = generate(model, prompt, 9)
    stop = free[0, 7:9].tolist()
    out = generate(model, prompt, 9, stop=[stop, [36, 36, 36, 36]])
    assert torch.equal(out[0, :9], free[0, :9]) and (out[0, 9:] == stop[-1]).all()
    # A sequence that begins in the prompt does not count, a single token is like eos.
    across = [int(prompt[0, -1]), int(free[0, 5])]
    assert torch.equal(generate(model, prompt[:1], 3, stop=[across]), free[:1, :8])
    one = int(free[1, 6])
    assert torch.equal(
        generate(model, prompt, 9, stop=[[one]]), generate(model, prompt, 9, eos=one)
    )
    two = {"eos": [one, int(free[2, 8])]}
    assert torch.equal(
        generate(model, prompt, 9, **two),
        generate(model, prompt, 9, stop=[[t] for t in two["eos"]]),
    )


def test_a_stream_gives_the_tokens_one_by_one(model, prompt):
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    out = generate(model, prompt, 6, **options)
    assert torch.equal(torch.cat([prompt, *stream(model, prompt, 6, **options)], 1), out)
    steps = stream(model, prompt, 6, **options)
    assert torch.equal(next(steps), out[:, 5:6]) and not model.training
    steps.close()  # an abandoned stream restores the mode
    assert model.training
    with pytest.raises(ValueError, match="stream: top_p"):
        stream(model, prompt, 6, top_p=2.0)


@pytest.fixture(scope="module", params=[1, 3])
def drafting(request) -> torch.nn.Module:
    torch.manual_seed(request.param)
    config = DeepSeekConfig(
        vocab_size=37, dim=48, num_layers=2, num_heads=2, hidden_dim=64, mtp_depths=request.param
    )
    model = spread(config.build(dtype=torch.float64))
    return model


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repetition_penalty": 1.5}])
def test_drafts_change_no_token(drafting, prompt, options):
    wanted = generate(drafting, prompt, 8, **options)
    eos = int(wanted[1, 9])
    ended = generate(drafting, prompt, 8, eos=eos, **options)
    depths = len(drafting.predictor.depths)
    for count in {1, depths}:
        out = generate(drafting, prompt, 8, num_draft_tokens=count, **options)
        assert torch.equal(out, wanted)
    more = options | {"eos": eos, "num_draft_tokens": depths}
    assert torch.equal(generate(drafting, prompt, 8, **more), ended)


def certain(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy that repeats its last token, as its predictor knows."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in [*model.layers, *(d["block"] for d in model.predictor.depths)]:
            for p in block.parameters():
                p.zero_()
        model.lm_head.weight.copy_(model.embed_tokens.weight)
        for depth in model.predictor.depths:  # passes the embedding of the last token on
            depth["proj"].weight.zero_()
            depth["proj"].weight[:, 48:].copy_(torch.eye(48))
    return model


def test_accepted_drafts_save_steps(drafting, prompt):
    model, depths = certain(drafting), len(drafting.predictor.depths)
    steps = [new.shape[1] for new in stream(model, prompt, 9, num_draft_tokens=depths)]
    assert sum(steps) == 9 and max(steps) == depths + 1
    assert len(steps) < 9


def test_drafts_are_the_predictor_s(drafting, prompt, monkeypatch):
    """Drafts from states, step by step, equal those of the predictor's forward at once."""
    model = copy.deepcopy(drafting).eval()
    from omniattn.models.generation.drafts import Drafts

    seen, propose = [], Drafts.propose

    def spy(self, out, end, choose):
        count = propose(self, out, end, choose)
        seen.append((end, out[:, : end + count].clone()))
        return count

    monkeypatch.setattr(Drafts, "propose", spy)
    generate(model, prompt, 10, num_draft_tokens=len(model.predictor.depths))
    checked = 0
    for end, tokens in seen:
        for d in range(1, tokens.shape[1] - end + 1):
            known = tokens[:, : end + d - 1]
            with torch.no_grad():
                # The trunk's states at positions before end - 1 see known tokens only.
                hidden = model.hidden(known)
                chains = model.predictor(
                    hidden,
                    known,
                    model.embed_tokens,
                    model.head,
                    lambda block, y: sum(block(y, rope=model.rotary(torch.arange(y.shape[1])))),
                )
            assert torch.equal(chains[d - 1][:, -1].argmax(-1), tokens[:, end + d - 1])
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 38}, "num_beams=38"),
        ({"num_beams": 2, "temperature": 1.0}, "temperature must be 0 with num_beams=2"),
        ({"length_penalty": 2.0}, "length_penalty and early_stopping need num_beams > 1"),
        ({"num_beams": 2, "early_stopping": "never"}, "early_stopping='never'"),
        ({"num_draft_tokens": 1}, "at most 0, the depths of the predictor of this Llama"),
        ({"stop": "ab"}, "stop must be a sequence of sequences"),
        ({"stop": [3]}, r"stop=\[3\]"),
        ({"stop": [[]]}, r"stop=\[\[\]\]"),
        ({"stop": [[37]]}, "stop=37"),
        ({"eos": [1, 40]}, "eos=40"),
        ({"top_pp": 0.4}, "did you mean 'top_p'"),
    ],
)
def test_names_the_wrong_option(model, prompt, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(model, prompt, 2, **options)
