"""Every type of model of transformers that builds from a small config, against its eager attention:
outputs, gradients, weights and generation, unpadded and padded on both sides, with
attn_implementation="omniattn" and with omniattn.hf.patch, then also its loss without logits.

A model gives the same or is refused by name. docs/hf.md says which, and the test holds it to that:

    pytest -m slow tests/hf/test_sweep.py
    export PYTHONPATH=tests/support:tests/support/small
    python tests/hf/test_sweep.py          # writes the lists of the page
    python tests/hf/test_sweep.py t5 bart  # only tries these
"""

import contextlib
import copy
import inspect
import re
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import small_models
import torch
from torch import Tensor, nn

import omniattn.hf
from omniattn import functional
from omniattn.testing import threads

PAGE = Path(__file__).parents[2] / "docs/hf.md"

EQUAL, REFUSED, WITHOUT = "Equal", "Refused", "Without attention"
NOT_TRIED, FAILED = "Not tried", "Failed"


#: Models whose eager attention is wrong in transformers 5.23, with the reason: compared with sdpa.
_LOGICAL_NOT = "eager reads its additive mask as a bool one and gives NaN"
WRONG_IN_EAGER = {
    "nemotron3_5_asr": _LOGICAL_NOT,
    "nemotron_asr_streaming": _LOGICAL_NOT,
    "nemotron_asr_streaming_encoder": _LOGICAL_NOT,
    "sam3": "its gradients are NaN in float64, and in float32 as far from sdpa's as from ours",
}
#: Models whose weights are not compared.
OTHER_WEIGHTS = {
    **dict.fromkeys(WRONG_IN_EAGER, "sdpa gives none"),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), "eager gives them as if there were no sink"),
    **dict.fromkeys(("led", "longformer"), "patched they refuse to give them"),
    **dict.fromkeys(("bridgetower", "pix2struct"), "their layers do not ask for them"),
}


def tensors(output) -> list[Tensor]:
    """Returns the float tensors of a model's output, without caches and attention weights."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "items"):
        return [
            x
            for name, part in output.items()
            if not any(other in name for other in ("past_key_values", "cache", "attentions"))
            for x in tensors(part)
        ]
    return [x for part in output for x in tensors(part)] if isinstance(output, tuple) else []


def masked(output, real: Tensor) -> list[Tensor]:
    """Returns the output's float tensors at real tokens; VideoPrism appends a token."""
    appended = nn.functional.pad(real, (0, 1), value=True)
    kept = {mask.shape: mask for mask in (real, appended)}
    return [x[kept[x.shape[:2]]] if x.shape[:2] in kept else x for x in tensors(output)]


def assert_close(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    assert len(actual) == len(expected), what
    sizes = (e[e.isfinite()].abs().max().item() for e in expected if e.isfinite().any())
    largest = max(sizes, default=0)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape, what
        finite = e.isfinite()
        assert torch.equal(a.isfinite(), finite), what
        if finite.any():
            error = (a - e)[finite].abs().max().item()
            # Some gradients, such as that of a bias of the keys, are zero up to rounding.
            bound = 1e-3 * e[finite].abs().max().item() + 1e-5 * largest
            assert error <= bound, f"{what} by {error:.1e} of {largest:.1e}"


def cases(model) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Arguments of the model and which tokens are real."""
    dtype = next(model.parameters()).dtype
    given = {
        name: x.to(dtype) if x.is_floating_point() else x
        for name, x in small_models.inputs(model).items()
    }
    real = torch.ones(2, small_models.LENGTH, dtype=torch.bool)
    found = {"no padding": (given, real)}
    if "attention_mask" in given:
        for side in ("right", "left"):
            real = real.clone().fill_(True)
            real[1, slice(9, None) if side == "right" else slice(4)] = False
            found[side] = ({**given, "attention_mask": real.long()}, real)
    return found


def weights(output) -> list[Tensor]:
    """The attention weights that a model gives."""
    parts = [(name, part) for name, part in output.items() if "attentions" in name]
    return [x for _, part in parts for x in tensors(part)]


def results(model) -> dict[str, list[Tensor]]:
    """All that is compared, by what it is."""
    found = {}
    for name, (given, real) in cases(model).items():
        torch.manual_seed(0)
        with torch.no_grad():
            found[f"outputs with {name}"] = masked(model(**given), real)
    # The last case except left padding, where models number positions in their own ways.
    given, real = list(cases(model).values())[:2][-1]
    torch.manual_seed(0)
    outputs = [x for x in masked(model(**given), real) if x.requires_grad]
    if outputs:
        generator = torch.Generator().manual_seed(2)
        sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found["gradients"] = list(grads.values())
    # Some models give no attention weights.
    with contextlib.suppress(TypeError, ValueError, NotImplementedError), torch.no_grad():
        given, _ = next(iter(cases(model).values()))
        found["weights"] = weights(model(**given, output_attentions=True))
    if model.can_generate() and "input_ids" in given and "pixel_values" not in given:
        given, _ = list(cases(model).values())[-1]
        given = {n: x for n, x in given.items() if not n.startswith("decoder_")}
        with contextlib.suppress(Exception), torch.no_grad():
            tokens = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            found["generation"] = [tokens.float()]
    return found


def compare(model, expected: dict[str, list[Tensor]], how: str) -> None:
    actual = results(model)
    if "weights" not in expected:
        actual.pop("weights", None)
    assert actual.keys() == expected.keys(), f"{how}: {expected.keys() ^ actual.keys()}"
    for name in expected:
        assert_close(actual[name], expected[name], f"{how}: {name} differ")


def losses(model, **options) -> list[Tensor] | None:
    """The loss of a language model and its gradients, None if it has none for its inputs."""
    given, _ = next(iter(cases(model).values()))
    labels = given.get("decoder_input_ids", given.get("input_ids"))
    if "labels" not in inspect.signature(model.forward).parameters or labels is None:
        return None
    model.zero_grad()
    output = model(**given, labels=labels, **options)
    output["loss"].backward()
    return [output["loss"], *(p.grad for p in model.parameters() if p.grad is not None)]


def compare_losses(eager, patched) -> None:
    """With and without logits, where `patch` has changed the loss of a model."""
    try:
        expected = losses(eager)
    except Exception:
        return  # labels of another kind
    options = {"skip_logits": True} if hasattr(type(patched), "omniattn_original") else {}
    if expected is not None:
        assert_close(losses(patched, **options), expected, "patch: losses differ")


def refused(error: NotImplementedError) -> str:
    """Returns the subject of this package's error, in a word or two."""
    found = re.match(r"omniattn\.hf: (\w+) (.*?)( and never|, which)", str(error))
    assert found is not None, f"must come from this package and name the model, got {error}"
    own = re.match(r"computes its attention itself \((\w+)\)", found[2])
    return own[1] if own is not None else f"{found[1]} {found[2]}"


def try_model(model_type: str, dtype: torch.dtype) -> tuple[str, str]:
    try:
        eager = small_models.make(model_type).to(dtype)
        ours, patched = copy.deepcopy(eager), copy.deepcopy(eager)
        if model_type in WRONG_IN_EAGER:
            eager.set_attn_implementation("sdpa")
        expected = results(eager)
        if model_type in OTHER_WEIGHTS:
            expected.pop("weights", None)
        if any(x.isnan().any() for found in expected.values() for x in found):
            raise ArithmeticError("eager attention gives NaN")
    except Exception as error:
        return NOT_TRIED, type(error).__name__ + " " + str(error)[-120:].replace("\n", " ")
    how = EQUAL, ""
    calls = mock.Mock()
    calls.attention.side_effect = functional.attention
    calls.selected_attention.side_effect = functional.selected_attention
    used = {"attention": calls.attention, "selected_attention": calls.selected_attention}
    with mock.patch.dict(vars(functional), used):
        try:
            ours.set_attn_implementation("omniattn")
            compare(ours, expected, "interface")
            if not calls.mock_calls:
                how = WITHOUT, ""
        except NotImplementedError as error:
            how = REFUSED, refused(error)
    omniattn.hf.patch(patched)
    try:
        compare(patched, expected, "patch")
        compare_losses(eager, patched)
    except NotImplementedError as error:
        assert how == (REFUSED, refused(error))
    return how


def outcome(model_type: str) -> tuple[str, str]:
    """How a type of model fares, and the layer that an error names."""
    try:
        return try_model(model_type, torch.float32)
    except AssertionError:
        # Rounding, unless the models differ in double precision as well.
        how = try_model(model_type, torch.float64)
        if how[0] == NOT_TRIED:
            raise
        return how


def written() -> dict[str, str]:
    """Type of model -> under which title docs/hf.md has it."""
    lists = re.findall(r"^### ([\w ]+)(.*?)(?=^#|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {name: title for title, text in lists for name in re.findall(r"`([^`]+)`", text)}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", small_models.model_types())
def test_every_model_is_equal_or_refused_by_name(model_type):
    assert outcome(model_type)[0] == written()[model_type]


def write(found: dict[str, tuple[str, str]]) -> None:
    """Replaces the lists of docs/hf.md, which are the end of the page."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, (title, detail) in sorted(found.items()):
        groups[title][detail if title == REFUSED else ""].append(f"`{name}`")
    lists = ""
    for title in (EQUAL, REFUSED, WITHOUT, NOT_TRIED):
        parts = [
            (f"{detail}: " if detail else "") + ", ".join(names)
            for detail, names in sorted(groups[title].items())
        ]
        bullet = "- " if title == REFUSED else ""
        body = "\n".join(
            textwrap.fill(bullet + part, 100, break_on_hyphens=False, break_long_words=False)
            for part in parts
        )
        lists += f"\n### {title}\n\n{body}\n"
    head = PAGE.read_text().partition("\n### ")[0]
    PAGE.write_text(head + lists)


def main(model_types: list[str]) -> None:
    """Tries the types, or all and writes the page; 1 if one fails."""
    omniattn.hf.register()
    found, failed = {}, 0
    for model_type in model_types or small_models.model_types():
        started = time.perf_counter()
        try:
            found[model_type] = outcome(model_type)
        except Exception as error:
            found[model_type] = FAILED, f"{type(error).__name__} {error}"
            failed += 1
        print(model_type, *found[model_type], f"{time.perf_counter() - started:.1f} s", flush=True)
    if not failed and not model_types:
        write(found)
    sys.exit(failed > 0)


if __name__ == "__main__":
    with threads(1):
        main(sys.argv[1:])
