"""The baselines that the benchmarks time against."""

import pytest
import run
import torch
from baselines import BASELINES

from omniattn.testing import registry


def test_every_op_has_baselines_and_every_baseline_an_op():
    assert BASELINES.keys() == registry().keys()


@pytest.mark.parametrize("op", BASELINES)
def test_baselines_compute_the_same(op):
    spec = registry()[op]
    for name, baseline in BASELINES[op].items():
        if name in ("compiled", "flex"):
            continue
        for case in spec.cases:
            if name == "aten" and "ties" in case.tensors:
                continue  # torch.topk leaves their order open
            call = spec.call(case, torch.float32)
            try:
                actual = call.run(baseline)
            except NotImplementedError:
                continue
            if all(case.sizes.values()) and case.label not in (
                "emptyrows",
                "nothing",
                "impossible",
            ):
                expected = call.run(spec.reference)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_masks_fit_the_sizes_that_are_checked():
    cases = 0
    for spec in registry().values():
        for case in (benchmark.case for benchmark in spec.benchmarks):
            if "mask" in case.options:
                shortened = run.shortened(case, run.LONGEST_CHECK)
                spec.call(shortened, torch.float32).run(spec.public)
                cases += 1
    assert cases > 5
