"""Lists of the public names of other libraries: there, refused or absent."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).with_name("names")
#: Packages of other libraries, and the modules of this one that have their functions.
MODULES = {
    "causal_conv1d": "omniattn.compat.causal_conv1d",
    "fla": "omniattn.compat.fla",
    "flash_attn": "omniattn.compat.flash_attn",
    "flash_attn_interface": "omniattn.compat.flash_attn.hopper",
    "liger_kernel": "omniattn.compat.liger",
    "mamba_ssm": "omniattn.compat.mamba_ssm",
    "natten": "omniattn.compat.natten",
    "xformers": "omniattn.compat.xformers",
}


@dataclass
class Names:
    """Public names of a module of another library."""

    #: Name there -> name here.
    there: dict[str, str] = field(default_factory=dict)
    #: Name -> reason.
    refused: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


@dataclass
class Library:
    """Modules of a library with their names, and the version from which they were taken."""

    version: str
    commit: str
    modules: dict[str, Names]


@functools.cache
def library(package: str) -> Library:
    """Reads the list of a package.

    A list has the version and the commit in the first line. Lines in brackets begin a module. The
    next lines are ``+ names that exist here``, with ``name=other`` where the name here is another
    one, ``- names that do not`` and ``! reason: names``.
    """
    first, *lines = (FOLDER / f"{package}.txt").read_text(encoding="utf-8").splitlines()
    version, commit = first.split()
    modules: dict[str, Names] = {}
    names = Names()
    for line in lines:
        kind, _, rest = line.partition(" ")
        if line.startswith("["):
            names = modules[line[1:-1]] = Names()
        elif kind == "+":
            pairs = (word.partition("=") for word in rest.split())
            names.there |= {name: other or name for name, _, other in pairs}
        elif kind == "-":
            names.absent += rest.split()
        elif kind == "!":
            reason, _, words = rest.rpartition(": ")
            names.refused |= dict.fromkeys(words.split(), reason)
    return Library(version, commit, modules)
