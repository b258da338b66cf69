"""Recall tasks: each answer is found again from the tokens before it."""

import pytest
import torch

from omniattn.compare import TASKS, AssociativeRecall, MultiHop, Needle, SelectiveCopy
from omniattn.compare.recall import IGNORED, right


def examples(task, seed=0):
    """(tokens, {position: answer}) of some examples, as Python numbers."""
    tokens, targets = task.batch(20, seed, 3)
    assert tokens.shape == targets.shape and tokens.max() < task.vocab_size and tokens.min() >= 0
    for row, due in zip(tokens.tolist(), targets.tolist(), strict=True):
        yield row, {i: answer for i, answer in enumerate(due) if answer != IGNORED}


def test_needle():
    task = Needle(24)
    for row, answers in examples(task):
        (place,) = [i for i, token in enumerate(row) if token == task.symbols]
        assert row[-1] == task.symbols + 1
        assert answers == {23: row[place + 1]}
    generator = torch.Generator().manual_seed(0)
    tokens, targets = task.at(torch.tensor([0, 21]), generator)
    assert tokens[0, 0] == tokens[1, 21] == task.symbols
    assert targets[:, -1].tolist() == [tokens[0, 1], tokens[1, 22]]


def test_associative_recall():
    task = AssociativeRecall(32)
    n = task.pairs
    for row, answers in examples(task):
        pairs = dict(zip(row[: 2 * n : 2], row[1 : 2 * n : 2], strict=True))
        assert len(pairs) == n
        asked = range(2 * n, 4 * n, 2)
        assert answers == {i: pairs[row[i]] for i in asked}
        assert sorted(row[i] for i in asked) == sorted(pairs)
        assert max(pairs) < task.symbols // 2 <= min(answers.values())


def test_multi_hop():
    task = MultiHop()
    for row, answers in examples(task):
        links = dict(zip(row[:16:2], row[1:16:2], strict=True))
        assert len(links) == 8
        asked = [i for i in range(16, len(row)) if row[i - 1] == task.symbols]
        assert answers == {i: links[links[row[i]]] for i in asked}
        assert all(row[i + 1] == answer for i, answer in answers.items() if i + 1 < len(row))


def test_selective_copy():
    task = SelectiveCopy(32)
    for row, answers in examples(task):
        mark = row.index(task.symbols + 1)
        content = [token for token in row[:mark] if token != task.symbols]
        assert [answers[i] for i in sorted(answers)] == content and len(content) == task.copied
        assert sorted(answers) == list(range(mark, mark + task.copied))
        assert row[mark + 1 :] == content[:-1]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_examples_follow_from_seed_and_step(task):
    first = task(32).batch(4, 5, 6)
    assert all(map(torch.equal, first, task(32).batch(4, 5, 6)))
    for other in (task(32).batch(4, 6, 6), task(32).batch(4, 5, 7)):
        assert not torch.equal(first[0], other[0])
    assert all(map(torch.equal, task(32).held_out_batch(4), task(32).held_out_batch(4)))
    with pytest.raises(ValueError, match=r"length must be >= \d+ with .* got length=3"):
        task(3)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_accuracy_counts_answers(task):
    """A model that knows the targets is always right; one that says 0 is right by chance."""
    batch = task(32).batch(500, 0, 0)

    def knows(tokens):
        return torch.nn.functional.one_hot(batch[1].clamp(min=0), 40).float()

    assert right(knows, batch).all()
    drawn = torch.randint(
        task(32).symbols, batch[0].shape, generator=torch.Generator().manual_seed(1)
    )
    guessed = right(lambda tokens: torch.nn.functional.one_hot(drawn, 40).float(), batch)
    assert 0 < guessed.double().mean() < 3 * task(32).chance
