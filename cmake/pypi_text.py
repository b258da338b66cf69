"""The text of the package index: README.md with links that work outside of the repository.

A relative link points into the tree of this version at `project.urls.Repository`, and a picture to
its raw file there. While the project has no public address, a link is left as its text, and a
picture is left out.
"""

import re
from pathlib import Path

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")


def absolute(text, repository, version):
    """`text` with its relative links pointing to `repository`, an address or None."""

    def replace(match):
        picture, label, target = match.groups()
        if repository is None:
            return "" if picture else label
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository.rstrip('/')}/{kind}/v{version}/{target})"

    return _LINK.sub(replace, text)


def dynamic_metadata(settings, project):
    """The hook of scikit-build-core."""
    text = Path("README.md").read_text(encoding="utf-8")
    repository = project.get("urls", {}).get("Repository")
    text = absolute(text, repository, project["version"])
    return {"readme": {"text": text, "content-type": "text/markdown"}}
