"""python -m omniattn check: its table, and its exit code when an op is wrong."""

import re
from dataclasses import replace

import torch

from omniattn.cli import main
from omniattn.testing import Benchmark, registry


def test_an_op_that_is_right_passes(capsys):
    assert main(["check", "rms_norm", "--no-speed"]) == 0
    out = capsys.readouterr().out
    assert out.count("rms_norm") == 8  # four dtypes, two passes
    assert "all within budget" in out


def test_an_op_that_is_wrong_fails(capsys, monkeypatch):
    spec = registry()["swiglu"]

    def wrong(gate, up=None):
        return spec.reference(gate, up) + 1e-2

    broken = replace(spec, cases=spec.cases[:1])
    monkeypatch.setattr("omniattn.cli.check.registry", lambda: {"swiglu": broken})
    monkeypatch.setattr("omniattn.functional.swiglu", wrong)
    assert main(["check", "--no-speed"]) == 1
    out = capsys.readouterr().out
    assert "FAILED swiglu f32 forward: tiny-M2N3: error 0.01 of output 0" in out
    assert "4 out of budget" in out


def test_an_op_that_raises_fails(capsys, monkeypatch):
    def missing(gate, up=None):
        raise NotImplementedError("no kernel here")

    monkeypatch.setattr("omniattn.functional.swiglu", missing)
    assert main(["check", "swiglu", "--no-speed"]) == 1
    assert "no kernel here" in capsys.readouterr().out


def test_an_unknown_op_is_named(capsys):
    assert main(["check", "rms_norm", "atention"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("check: no op atention; there are ")
    assert " attention, " in message
    assert message.endswith("; did you mean 'attention'?\n")


def test_speed_is_shown_where_there_is_a_benchmark(capsys, monkeypatch):
    spec = registry()["swiglu"]
    case = spec.cases[0]
    timed = Benchmark(case, (torch.float32,), ("forward+backward",))
    small = replace(spec, cases=(case,), benchmarks=(timed,))
    monkeypatch.setattr("omniattn.cli.check.registry", lambda: {"swiglu": small})
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"swiglu +f32 .* \d+\.\d\dx  tiny", out)) == 2
    assert len(re.findall(r"\dx ", out)) == 2


def test_an_op_without_gradient_is_checked_forward(capsys):
    assert main(["check", "uniform_like", "--no-speed"]) == 0
    assert "backward" not in capsys.readouterr().out
