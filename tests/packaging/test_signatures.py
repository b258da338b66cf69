"""Signatures of the public functions, as help() and editors show them, are those in signatures.txt.

`python tests/packaging/test_signatures.py` writes this file anew; a commit that changes it explains
each changed line.
"""

import importlib
import inspect
from pathlib import Path
from types import FunctionType

SIGNATURES = Path(__file__).with_name("signatures.txt")
#: Packages whose functions users call.
PACKAGES = (
    "functional",
    "functional.masks",
    "functional.routing",
    "reference",
    "compat.causal_conv1d",
    "compat.fla",
    "compat.flash_attn",
    "compat.flash_attn.hopper",
    "compat.mamba_ssm",
    "compat.natten",
    "compat.torch",
    "compat.xformers",
    "distributed",
    "training",
)


class Unquoted(str):
    """Text of an annotation, shown without quotes."""

    __repr__ = str.__str__


def shown(function: FunctionType) -> str:
    """Signature of a function on one line."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=unquoted(p.annotation)) for p in signature.parameters.values()
    ]
    result = unquoted(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def unquoted(annotation: object) -> object:
    return Unquoted(annotation) if isinstance(annotation, str) else annotation


def signatures() -> list[str]:
    """package.function(parameters) -> result of all public functions."""
    found = []
    for package in PACKAGES:
        module = importlib.import_module(f"omniattn.{package}")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if isinstance(value, FunctionType):
                found.append(f"{package}.{name}{shown(value)}")
    return found


def test_signatures_are_those_of_the_file():
    expected = SIGNATURES.read_text(encoding="utf-8").splitlines()
    found = signatures()
    changed = [f"- {line}" for line in expected if line not in found]
    changed += [f"+ {line}" for line in found if line not in expected]
    assert not changed, "\n".join([*changed, f"if this is meant, run python {__file__}"])
    assert found == expected


if __name__ == "__main__":
    SIGNATURES.write_text("\n".join(signatures()) + "\n", encoding="utf-8")
