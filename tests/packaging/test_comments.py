"""Comments, docstrings and pages name their subject, so that no reader has to look for it."""

import counts
import pytest


def test_few_comments_begin_with_a_pronoun():
    found = counts.pronoun_comments()
    assert len(found) <= 10, "\n".join(found)


@pytest.mark.parametrize(
    ("suffix", "source", "found"),
    [
        (".py", "x = 1\n# Of the last call.\n# Those of rows.\n", [2]),
        (".py", 'def f():\n    """What a call returns."""\n', [2]),
        (".py", "#: Number of rows.\nx = 'Of y'  # the same\n", []),
        (".h", "// Computes x.\n// Of rows.\nint x;  // Its stride.\n", [3]),
        (".cmake", "# Both of them\nset(x 1)\n", [1]),
    ],
)
def test_such_a_comment_is_found(tmp_path, suffix, source, found):
    path = tmp_path / f"file{suffix}"
    path.write_text(source)
    assert [n for n, text in counts.comments(path) if counts.PRONOUN.match(text)] == found


def test_few_sentences_of_pages_begin_with_a_pronoun():
    found = counts.pronoun_sentences()
    assert len(found) <= 5, "\n".join(found)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("# What it is\n\nIt is new. It is a test.", ["It is new."]),
        ("- A mask. Those of rows\n  are others.\n- Of the last call.", ["Those", "Of"]),
        ("What does it keep? Rows.\n\n| the | table |\n\n```\nIts = 1\n```", []),
    ],
)
def test_such_a_sentence_is_found(page, found):
    sentences = list(counts.unclear_sentences(page))
    assert [s[: len(f)] for s, f in zip(sentences, found, strict=True)] == found
