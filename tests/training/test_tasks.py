"""Contents of the batches of each task, except language modelling."""

import sys

import pytest
import torch

from omniattn.training import (
    Digits,
    LanguageModeling,
    MaskedLanguageModeling,
    ReplacedTokens,
    SpanCorruption,
)

TEXT = bytes(range(256)) * 40


def test_masking_keeps_its_shares_and_asks_for_the_text():
    task = MaskedLanguageModeling(TEXT, 255)
    tokens, targets = task.batch(64, 0, 0)
    text = task.data.windows(64, 0, 0)[:, :-1]
    asked = targets >= 0
    assert torch.equal(targets[asked], text[asked])
    assert torch.equal(tokens[~asked], text[~asked])
    assert 0.13 < asked.double().mean() < 0.17
    masked = tokens[asked] == task.MASK
    kept = tokens[asked] == text[asked]
    assert 0.76 < masked.double().mean() < 0.84
    assert 0.07 < kept.double().mean() < 0.13  # by chance another byte is the same one
    assert tokens.max() <= 256


class Judge(torch.nn.Module):
    """Proposes "x" for each target, and names "x" and "y"."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def propose(self, tokens, targets):
        proposed = tokens.where(targets < 0, ord("x"))
        return proposed, (proposed != targets.where(targets >= 0, tokens)).long(), None

    def forward(self, tokens):
        return ((tokens == ord("x")) | (tokens == ord("y"))).float() - 0.5


def test_replaced_bytes_are_counted_and_shown_in_brackets():
    task = ReplacedTokens(b"ay" * 500, 40)
    tokens, targets = task.batch(2, 0, 0)
    masked = MaskedLanguageModeling(b"ay" * 500, 40).batch(2, 0, 0)
    assert torch.equal(tokens, masked[0]) and torch.equal(targets, masked[1])
    judge, batch = Judge(), task.held_out_batch(3)
    proposed, replaced, _ = judge.propose(*batch)
    wrong = ((proposed == ord("y")) & (replaced == 0)).double().mean().item()
    assert task.metrics(judge, batch) == {"found": 1.0, "accuracy": pytest.approx(1 - wrong)}
    shown = task.sample(judge, 0)
    assert shown.count("[x]") == int((task.held_out_batch(1)[1] >= 0).sum())
    assert "[y]" in shown and "[a]" not in shown


@pytest.mark.parametrize("length", [4, 33, 255])
def test_spans_and_source_make_the_text(length):
    task = SpanCorruption(TEXT, length)
    batch = task.batch(5, 0, 3)
    text = task.data.windows(5, 0, 3)[:, :-1]
    for source, tokens, targets, original in zip(*batch, text, strict=True):
        assert tokens.tolist() == [task.START, *targets[:-1].tolist()]
        assert source[-1] == targets[-1] == task.END
        spans: dict[int, list[int]] = {}
        for token in targets[:-1].tolist():
            if token >= task.SENTINEL:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == [task.SENTINEL + i for i in range(task.spans)]
        assert all(spans.values())
        restored = []
        for token in source[:-1].tolist():
            restored += spans.get(token, [token])
        assert restored == original.tolist()
    other = task.batch(5, 0, 4)
    assert [t.shape for t in other] == [t.shape for t in batch]


def test_partitions_are_drawn_evenly():
    task = SpanCorruption(TEXT, 40)  # 6 bytes in 2 spans: 1 + 5, ..., 5 + 1
    lengths = task._partition(6, torch.rand(6000, 5, generator=torch.Generator().manual_seed(0)))
    assert (lengths.sum(-1) == 6).all()
    counts = torch.bincount(lengths[:, 0], minlength=6)
    assert counts[0] == 0
    assert (counts[1:] - 1200).abs().max() < 150  # five deviations


@pytest.mark.parametrize(("length", "message"), [(1, "1 spans"), (2040, "102 spans")])
def test_windows_that_span_corruption_cannot_use(length, message):
    with pytest.raises(ValueError, match=message):
        SpanCorruption(TEXT * 2, length)


def test_digits_are_split():
    pytest.importorskip("sklearn")
    task = Digits()
    images, labels = task.batch(32, 0, 0)
    assert images.shape == (32, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert not torch.equal(labels, task.batch(32, 0, 1)[1])
    held_out, targets = task.held_out_batch(1)
    assert len(held_out) + len(task.train[0]) == 1797
    assert sorted(set(targets.tolist())) == list(range(10))


def test_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'omniattn\[train\]'"):
        Digits()


@pytest.mark.parametrize(
    "task", [LanguageModeling, MaskedLanguageModeling, ReplacedTokens, SpanCorruption]
)
def test_texts_are_bytes_or_are_loaded(task, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    for wrong in (path, str(path), [1, 2], None):
        name = task.__name__
        with pytest.raises(TypeError, match=rf"^{name}: text must be bytes \({name}.load\(path"):
            task(wrong, 64)
    with pytest.raises(TypeError, match=f"^{name}: length must be an int >= 1, got length='8'"):
        task(TEXT, "8")
    assert task.load(str(path), 64).digest == task.load(path, 64).digest == task(TEXT, 64).digest
