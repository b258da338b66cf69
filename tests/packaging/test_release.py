"""A version is given by one command, and the text of the package index has no dead link."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pypi_text
import pytest

import omniattn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path):
    """A repository of the files that a release reads and writes."""
    for path in ("tools/release.py", "python/omniattn/__init__.py", "CHANGELOG.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\n- More.\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "test")
    git(tmp_path, "config", "user.email", "test@localhost")
    commit(tmp_path)
    return tmp_path


def git(folder, *command):
    return subprocess.check_output(["git", "-C", folder, *command], text=True).strip()


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "change")


def release(folder, version):
    """Returns the output of the command, with its errors."""
    command = [sys.executable, folder / "tools/release.py", version]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == (1 if result.stderr else 0)
    return result.stdout + result.stderr


def test_release_commits_and_tags(clone):
    assert "v7.8.9 is committed and tagged" in release(clone, "7.8.9")
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "rev-parse", "v7.8.9^{commit}") == git(clone, "rev-parse", "HEAD")
    assert '__version__ = "7.8.9"\n' in (clone / "python/omniattn/__init__.py").read_text()
    assert re.search(r"\n## 7\.8\.9 \(\d{4}-\d\d-\d\d\)\n", (clone / "CHANGELOG.md").read_text())


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("next", "three numbers"),
        ("0.0.1", "must not fall"),
        ("7.8.9", "tagged already"),
        ("7.9.0", "changes under"),
    ],
)
def test_release_refuses(clone, version, error):
    release(clone, "7.8.9")
    head = git(clone, "rev-parse", "HEAD")
    assert error in release(clone, version)
    assert git(clone, "rev-parse", "HEAD") == head
    assert git(clone, "status", "--porcelain") == ""


def test_release_refuses_a_changed_tree(clone):
    (clone / "new.txt").touch()
    assert "must be clean" in release(clone, "7.8.9")
    assert git(clone, "tag") == ""


def links(text):
    """The relative ones, and the others."""
    targets = re.findall(r"\]\(([^)]*)\)", text)
    relative = [target for target in targets if not target.startswith(("https://", "#"))]
    return relative, [target for target in targets if target not in relative]


def test_links_of_the_index_text_follow_the_repository():
    text = "![plot](a/b.png) and [page](docs/c.md#d), [top](#e), [paper](https://f.g/h)."
    assert pypi_text.absolute(text, "https://host/us/it/", "1.2.3") == (
        "![plot](https://host/us/it/raw/v1.2.3/a/b.png) and "
        "[page](https://host/us/it/blob/v1.2.3/docs/c.md#d), [top](#e), [paper](https://f.g/h)."
    )
    assert pypi_text.absolute(text, None, "1.2.3") == (
        " and page, [top](#e), [paper](https://f.g/h)."
    )


@pytest.mark.parametrize("urls", [{}, {"Repository": "https://host/us/it"}])
def test_index_text_of_the_readme(urls, monkeypatch):
    monkeypatch.chdir(ROOT)
    project = {"urls": urls, "version": omniattn.__version__}
    text = pypi_text.dynamic_metadata({}, project)["readme"]["text"]
    relative, others = links((ROOT / "README.md").read_text(encoding="utf-8"))
    assert not links(text)[0]
    assert len(links(text)[1]) == len(others) + (len(relative) if urls else 0)


def test_links_of_the_readme_exist():
    relative, _ = links((ROOT / "README.md").read_text(encoding="utf-8"))
    assert not [link for link in relative if not (ROOT / link).exists()]
