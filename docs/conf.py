"""Sphinx: README.md, CONTRIBUTING.md, docs/ and the docstrings as one site.

python -m sphinx -W -c docs . build/site
"""

from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

from omniattn.modules.layer import Layer

project = "omniattn"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# The source folder is the repository, so that relative links work here and on the forge.
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/api/*.rst"]
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

CONTENTS = {
    "Guides": ["migration", "caches", "distributed"],
    "API": ["functional", "masks", "modules", "models", "hf", "reference"],
    "Support and speed": ["ops", "variants", "benchmarks", "cuda", "cuda_resources"],
    "Development": ["architecture", "adding", "/CONTRIBUTING"],
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the contents of the site to the README, which is its first page."""
    if page == root_doc:
        for title, pages in CONTENTS.items():
            folder = "docs/api" if title == "API" else "docs"
            entries = "\n".join(p if p.startswith("/") else f"{folder}/{p}" for p in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


def init_signature(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> Any:
    """What a module takes: Sphinx shows __new__, with which Layer only checks the arguments."""
    if what != "class" or not issubclass(obj, Layer):
        return None
    found = signature(obj.__init__, bound_method=True)
    return stringify_signature(found, show_return_annotation=False, unqualified_typehints=True), ""


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", init_signature)
