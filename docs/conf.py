"""Sphinx: README.md, CONTRIBUTING.md, docs/ and the docstrings as one site.

python -m sphinx -W -c docs . build/site
"""

from importlib import import_module
from inspect import isclass
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from omniattn import functional

project = "omniattn"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# The source folder is the repository, so that relative links work here and on the forge.
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/api/*.rst"),
    "benchmarks/results/*.md",
]
root_doc = "README"
html_theme = "furo"
html_title = "omniattn"

default_role = "code"
smartquotes = False
napoleon_custom_sections = ["Shape", "Reference"]
napoleon_use_ivar = True
autodoc_default_options = {
    "members": True,
    "exclude-members": "extra_repr, reset_parameters",
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
myst_heading_anchors = 3
# An inherited __init__ names the nested Config of its base, which no longer is in scope.
suppress_warnings = ["ref.python"]

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
CONTENTS = {
    "Guides": [
        "migration",
        "hf",
        "hybrids",
        "own_variant",
        "fast",
        "finetune",
        "recipes",
        "deploy",
        "state_space",
        "generation",
        "caches",
        "distributed",
        "export",
        "cpp",
        "precision",
        "batch_invariance",
        "calculators",
        "worked_numbers",
        "compare",
        "choose",
    ],
    "API": [
        *(
            "functional",
            "masks",
            "modules",
            "models",
            "training",
            "distributed",
            "calculate",
            "compare",
            "hf",
            "compat",
        ),
        "reference",
    ],
    "Support and speed": [
        *("ops", "variants", "compat", "systems", "benchmarks", "hf_models", "goals"),
        *("accuracy", "cuda", "cuda_resources"),
    ],
    "Development": ["architecture", "adding", "/CONTRIBUTING"],
    "Benchmark records": [
        f"/benchmarks/results/{path.stem}" for path in sorted(RESULTS.glob("*.md"))
    ],
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the contents of the site to the README, which is its first page."""
    if page == root_doc:
        for title, pages in CONTENTS.items():
            folder = "docs/api" if title == "API" else "docs"
            entries = "\n".join(p if p.startswith("/") else f"{folder}/{p}" for p in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


class Functions(SphinxDirective):
    """`.. functions:: norm conv`: the public names of modules of omniattn.functional."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = [".. currentmodule:: omniattn.functional"]
        for module in self.arguments[0].split():
            found = import_module(f"omniattn.functional.{module}")
            for name in (n for n in found.__all__ if n in functional.__all__):
                kind = "autoclass" if isclass(getattr(found, name)) else "autofunction"
                lines += ["", f".. {kind}:: {name}"]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> None:
    app.add_directive("functions", Functions)
    app.connect("source-read", add_contents)
