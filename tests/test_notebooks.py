"""The notebooks run from top to bottom, each in well under a minute, and give what is stored."""

import json

import notebooks
import pytest

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.timeout(60)
def test_runs_and_gives_what_is_stored(path):
    """After an intended change, `python tests/support/notebooks.py` stores the new outputs."""
    cells = notebooks.code_cells(notebooks.read(path))
    for cell, outputs in zip(cells, notebooks.run(path), strict=True):
        found = notebooks.differences(cell, outputs)
        assert not found, "\n".join(["".join(cell["source"]), *found])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_stored_outputs_are_small_and_free_of_noise(path):
    cells = notebooks.code_cells(notebooks.read(path))
    assert all(cell["execution_count"] is None for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    text = json.dumps([output.get("text", "") for output in outputs])
    assert not any(noise in text for noise in ("/home", "/work", "/tmp", "Warning", " at 0x"))
    assert path.stat().st_size < 250_000


@pytest.mark.parametrize(
    ("now", "same"),
    [
        ("error 0.0350, off by 7e-16\n", True),
        ("error 0.0352, off by 2e-15\n", True),
        ("error 0.0450, off by 7e-16\n", False),
        ("error 0.0350, off by 7e-3\n", False),
        ("mean 0.0350, off by 7e-16\n", False),
        ("error 0.0350, off by 7e-16\nmore\n", False),
    ],
)
def test_a_changed_text_is_found(now, same):
    stored = {"output_type": "stream", "text": ["error 0.0350, off by 7e-16\n"]}
    cell = {"metadata": {}, "outputs": [stored]}
    assert (not notebooks.differences(cell, [stored | {"text": [now]}])) == same
    cell["metadata"]["tags"] = [notebooks.TIMES]
    assert not notebooks.differences(cell, [stored | {"text": [now]}])
    assert notebooks.differences(cell, [])


def test_a_changed_picture_is_found():
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    axes.plot([1, 2, 3])
    cell = {"metadata": {}, "outputs": [notebooks.picture(figure)]}
    assert not notebooks.differences(cell, [notebooks.picture(figure)])
    axes.fill_between([0, 1], 1, 3)
    assert notebooks.differences(cell, [notebooks.picture(figure)])
    figure.set_size_inches(8, 3)
    assert notebooks.differences(cell, [notebooks.picture(figure)])
    pyplot.close(figure)
