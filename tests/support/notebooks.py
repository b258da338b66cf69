"""Runs the notebooks and stores what they print and show: python tests/support/notebooks.py

The code cells run in this process: a Jupyter kernel would add seconds and five packages. Stored are
text and small pictures; no execution counts, warnings, values of last lines, or paths.
"""

import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from PIL import Image

FOLDER = Path(__file__).parents[2] / "notebooks"
TIMES = "times"  # the tag of a cell whose output differs from run to run
Output = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def picture(figure: Any) -> Output:
    """64 colours are a third of the size and look the same."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    Image.open(drawn).convert("RGB").quantize(64).save(small, "png", optimize=True)
    data = base64.b64encode(small.getvalue()).decode() + "\n"
    return {"data": {"image/png": data}, "metadata": {}, "output_type": "display_data"}


def run(path: Path) -> list[list[Output]]:
    """The outputs of each code cell."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    outputs: list[Output] = []

    def flush() -> None:
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
            printed.seek(0)
            printed.truncate()

    def show() -> None:
        flush()
        outputs.extend(picture(pyplot.figure(number)) for number in pyplot.get_fignums())
        pyplot.close("all")

    found = []
    namespace = {"__name__": "__main__"}
    original, pyplot.show = pyplot.show, show
    try:
        with matplotlib.rc_context():
            for number, cell in enumerate(code_cells(read(path))):
                outputs, printed = [], io.StringIO()
                code = compile("".join(cell["source"]), f"{path.name}[{number}]", "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
                flush()
                found.append(outputs)
    finally:
        pyplot.show = original
        pyplot.close("all")
    return found


def differences(cell: dict[str, Any], outputs: list[Output]) -> list[str]:
    """Lists the changes that running a cell made; for a timed cell, only changes in the kinds of
    output."""
    kinds = [[output["output_type"] for output in each] for each in (cell["outputs"], outputs)]
    if kinds[0] != kinds[1]:
        return [f"{kinds[0]} were stored, the run gave {kinds[1]}"]
    if TIMES in cell["metadata"].get("tags", []):
        return []
    pairs = zip(cell["outputs"], outputs, strict=True)
    return [text for old, new in pairs if (text := _difference(old, new))]


def _difference(old: Output, new: Output) -> str:
    if "text" in old:
        texts = ["".join(output["text"]) for output in (old, new)]
        return "" if _same_text(*texts) else f"stored:\n{texts[0]}now:\n{texts[1]}"
    pixels = [_pixels(output["data"]["image/png"]) for output in (old, new)]
    if pixels[0].shape != pixels[1].shape:
        return f"a picture of {pixels[0].shape} is {pixels[1].shape} now"
    change = float(numpy.abs(pixels[0] - pixels[1]).mean())
    return f"a picture differs by {change:.1f} of 255" if change > 2 else ""


def _pixels(data: str) -> Any:
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    return numpy.asarray(image, dtype=float)


def _same_text(old: str, new: str) -> bool:
    """Equal up to roundings, which differ between processors: numbers may differ by 5 % or by two
    of their last digit, and all below 1e-6 count as zero."""
    number = r"\d+(?:\.\d+)?(?:e-?\d+)?"
    words, now = ([part.split() for part in re.split(number, text)] for text in (old, new))
    if words != now:
        return False
    for a, b in zip(re.findall(number, old), re.findall(number, new), strict=True):
        digit = 10.0 ** -len(a.partition("e")[0].partition(".")[2]) if "." in a else 0.0
        x, y = (0.0 if float(text) < 1e-6 else float(text) for text in (a, b))
        if abs(x - y) > max(0.05 * x, 2.001 * digit * ("e" not in a)):
            return False
    return True


def store(path: Path) -> None:
    notebook = read(path)
    for cell, outputs in zip(code_cells(notebook), run(path), strict=True):
        cell["outputs"] = outputs
        cell["execution_count"] = None
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.ipynb")):
        store(each)
