"""Empty problems: results are right, and inputs get gradients of zeros instead of none.

Without them training on an empty batch ends in "appears to not have been used in the graph".
"""

import fuzz_episodes
import pytest
import torch

from omniattn import testing

SPECS = {name: spec for name, spec in testing.registry().items() if spec.differentiable}
TOKENS = {"T", "Tq", "Tk", "L", "M"}


def empty_cases(spec):
    """Every case without tokens; the first, the special and the empty ones with one size of 0."""
    special = [spec.cases[0], *map(spec.case, spec.special)]
    special += [case for case in spec.cases if case.label.startswith("no")]
    for case in spec.cases:
        names = [name for name in case.sizes if name not in fuzz_episodes.HEADS]
        empty = [{name} for name in names if case in special]
        for none in (TOKENS & set(names), *empty):
            yield case.resized({name: 0 if name in none else n for name, n in case.sizes.items()})


def is_taken(spec, case):
    """True if the op and its inputs have such sizes."""
    try:
        call = spec.call(case, torch.float64)
    except (ArithmeticError, IndexError, RuntimeError, ValueError):
        return False
    try:
        call.run(spec.function)
    except fuzz_episodes.ERRORS as error:
        assert "got" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", SPECS)
def test_empty_problems(name, one_thread):
    spec = SPECS[name]
    taken = [case for case in empty_cases(spec) if is_taken(spec, case)]
    assert taken
    for case in taken:
        testing.assert_within_budget(spec, case, torch.float64)
