"""benchmarks/long_context.py: steps of each mixer, and lengths that would take too long."""

import json

import long_context
import pytest


@pytest.mark.parametrize("mixer", long_context.MIXERS)
def test_a_step_trains_each_mixer(mixer):
    row = long_context.step(mixer, 48)
    assert row.keys() == set(long_context.FIELDS)
    assert row["tokens"] == 48 and 0 < row["loss"] < 7 and row["seconds"] > 0


def test_steps_that_take_too_long_are_left_out(monkeypatch, tmp_path, capsys):
    class Run:
        returncode = 0

        def __init__(self, command, **kwargs):
            mixer, tokens = command[-2:]
            seconds = int(tokens) / 1000
            row = dict.fromkeys(long_context.FIELDS, 1.0)
            self.stdout = json.dumps(
                row | {"mixer": mixer, "tokens": int(tokens), "seconds": seconds}
            )

    monkeypatch.setattr(long_context.subprocess, "run", Run)
    rows = long_context.measure(["full attention", "Mamba-2"], [1000, 4000, 8000], limit=10.0)
    found = [(row["mixer"], row["tokens"]) for row in rows]
    # From 1 s at 1,000 tokens attention would take 16 s at 4,000, and Mamba-2 takes 8 s at 8,000.
    assert found == [("full attention", 1000)] + [("Mamba-2", n) for n in (1000, 4000, 8000)]
    assert "4,000 tokens would take over 10 s" in capsys.readouterr().out
    long_context.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
