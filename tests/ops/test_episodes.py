"""Random calls of the whole registry: a few hundred; tools/fuzz.py makes millions of them."""

import csv
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fuzz_episodes
import pytest
import torch

from omniattn import testing

ROOT = Path(__file__).parents[2]
#: Episodes of each kind in a run of the tests.
FEW = 8


@pytest.fixture(autouse=True)
def one_thread():
    with testing.threads(1):
        yield


@pytest.mark.parametrize("kind", [*fuzz_episodes.KINDS][:-1])  # test_fuzz.py makes those
def test_episodes(kind):
    count = fuzz_episodes.Count()
    for seed in range(FEW):
        fuzz_episodes.run_episode(seed, [kind], count)
    assert count.calls >= FEW and count.refused <= count.calls / 4


@pytest.mark.parametrize("kind", ["values", "gradients", "strides", "packed"])
def test_an_episode_finds_wrong_results(kind, monkeypatch):
    """Every third call gives twice what it should."""
    calls = 0

    def wrong(self):
        def run(*args, **options):
            nonlocal calls
            calls += 1
            result = self.public(*args, **options)
            outputs = result if isinstance(result, tuple) else (result,)
            if calls % 3 == 0:
                outputs = tuple(o * 2 if o.is_floating_point() else o for o in outputs)
            return outputs

        return run

    monkeypatch.setattr(testing.OpSpec, "function", property(wrong))
    with pytest.raises(AssertionError, match=rf"seed \d+, {kind}, \w+: \w+\["):
        for seed in range(FEW):
            fuzz_episodes.run_episode(seed, [kind], fuzz_episodes.Count())


def test_a_seed_is_an_episode():
    """A seed determines the calls of an episode; another seed makes others."""
    shown = []
    for seed in (3, 3, 4):
        count = fuzz_episodes.Count()
        fuzz_episodes.run_episode(seed, ["gradients"], count)
        shown.append(str(count.last))
    assert shown[0] == shown[1] != shown[2]


def test_sizes_are_small_and_heads_fit():
    case = testing.registry()["attention"].case("plain")
    for seed in range(200):
        sizes = fuzz_episodes.drawn_sizes(random.Random(seed), replace(case))
        assert sizes["H"] % sizes["G"] == 0
        assert torch.tensor(list(sizes.values())).clamp(min=1).prod() <= fuzz_episodes.LARGE


#: Sizes with which a loss is 0, if not one class.
ONE = {"dsa_indexer_loss": {"Tk": 1, "n": 1}}


@pytest.mark.parametrize("name", sorted(fuzz_episodes.LOSSES))
def test_losses_of_zero_may_have_rounded(name):
    """One class, or one key, whose weights are sums of several heads."""
    spec = fuzz_episodes.SPECS[name]
    sizes = {**spec.cases[0].sizes, **ONE.get(name, {"V": 1}), "H": 6, "M": 9}
    sizes = {name: n for name, n in sizes.items() if name in spec.cases[0].sizes}
    for salt in range(20):
        drawn = fuzz_episodes._made(
            spec, spec.cases[0].resized(sizes), torch.float64, salt, fuzz_episodes.Count()
        )
        fuzz_episodes.assert_right(drawn)


@pytest.mark.slow
def test_the_tool_counts_failures_and_says_where_to_go_on(tmp_path):
    record = tmp_path / "record.csv"
    command = [sys.executable, ROOT / "tools/fuzz.py", "--record", record, "--episodes", "3"]
    for seed, kind, failures in (("0", "states", 0), ("3", "unknown", 3)):
        run = subprocess.run([*command, "--seed", seed, "--kinds", kind], capture_output=True)
        assert run.returncode == (failures > 0), run.stderr
    first, second = csv.DictReader(record.open())
    assert (first["first_seed"], first["last_seed"], first["failures"]) == ("0", "2", "0")
    assert (second["first_seed"], second["last_seed"], second["failures"]) == ("3", "5", "3")
