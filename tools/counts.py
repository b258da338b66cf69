"""Counts rooms (folders), imports between them, repeated argument lists, unclear comments.

    python tools/counts.py              # the counts, from syntax trees and text alone
    python tools/counts.py --calls      # and the microseconds of a call on a tiny problem
    python tools/counts.py --build DIR  # and the seconds of each target in its last build
    python tools/counts.py --comments   # the comments and sentences that begin with a pronoun

`tests/packaging/test_layers.py` holds the limits of rooms.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: First words of a comment that refer to something not yet mentioned.
PRONOUN = re.compile(
    r"(What|Of|The same|Those|Whose|That|These|Its?|They|Them|Theirs|Ours|Such|Both|Which|Who)\b"
)
#: First words of a sentence that refer to nothing in the sentence before, unlike "It" and "They".
NOUNLESS = re.compile(r"(What|Of|The same|Those|Whose|Theirs|Ours|Whoever|Which|Who)\b")


def tracked(*suffixes: str) -> list[Path]:
    """Returns the files under version control with one of these suffixes."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    return [ROOT / name for name in names if name.endswith(suffixes)]


def python_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring and of each comment's first line."""
    last_comment, last_type = 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if not (alone and last_comment == line - 1):
                yield line, token.string.lstrip("#: ")
            last_comment = line if alone else 0
        elif token.type != tokenize.NL:
            starts = last_type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE)
            if token.type == tokenize.STRING and starts:
                yield line, token.string.strip('"\n ')
            if token.type != tokenize.ENCODING:
                last_type = token.type


def line_comments(source: str, mark: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of the first line of each comment that begins with `mark`."""
    above = False
    for number, line in enumerate(source.split("\n"), 1):
        code, found, text = line.partition(mark)
        alone = bool(found) and not code.strip()
        if found and not (alone and above):
            yield number, text.strip()
        above = alone


def comments(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        return python_comments(source)
    return line_comments(source, "//" if path.suffix in (".h", ".cpp", ".cu") else "#")


def pronoun_comments() -> list[str]:
    """Returns "file:line: text" of comments and docstrings that begin with a pronoun."""
    files = tracked(".py", ".pyi", ".h", ".cpp", ".cu", ".cmake", "CMakeLists.txt")
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in comments(path)
        if PRONOUN.match(text)
    ]


def paragraphs(page: str) -> Iterator[str]:
    """Yields paragraphs and list items of a Markdown page, without code, tables and headings."""
    prose = re.sub(r"^ *```.*?^ *```$|^[|#<].*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    for text in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", prose):
        yield " ".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", text).split())


def unclear_sentences(page: str) -> Iterator[str]:
    """Yields sentences of a Markdown page that begin with a pronoun without a referent."""
    for paragraph in paragraphs(page):
        first, *others = re.split(r"(?<=[.!?:]) (?=[A-Z])", paragraph)
        found = [first] if PRONOUN.match(first) else []
        found += [sentence for sentence in others if NOUNLESS.match(sentence)]
        yield from (sentence for sentence in found if not sentence.endswith("?"))


def pronoun_sentences() -> list[str]:
    """Returns "page: sentence" of unclear sentences in pages and notebooks."""
    found = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in tracked(".md")
        for sentence in unclear_sentences(path.read_text(encoding="utf-8"))
    ]
    for path in tracked(".ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                sentences = unclear_sentences("".join(cell["source"]))
                found += [f"{path.relative_to(ROOT)}: {sentence}" for sentence in sentences]
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields dotted names that a file imports, also in functions and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_imports(package: str) -> collections.Counter[tuple[str, str]]:
    """Counts names imported between rooms of omniattn.<package>: (importer, imported) -> count."""
    root = ROOT / "python/omniattn" / package
    rooms = {path.parent.name for path in root.glob("*/__init__.py")}
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in root.glob("*/*.py"):
        room = path.parent.name
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[:2] == ["omniattn", package] and parts[2] in rooms - {room}:
                found[room, parts[2]] += 1
    return found


def folder_sizes() -> collections.Counter[str]:
    """Counts source files per folder."""
    files = tracked(".py", ".h", ".cpp", ".cu")
    return collections.Counter(str(path.parent.relative_to(ROOT)) for path in files)


def signatures_with(*names: str) -> int:
    """Counts the package's Python functions that have all these parameters."""
    count = 0
    for path in tracked(".py"):
        if not path.is_relative_to(ROOT / "python"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                a = node.args
                given = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
                count += given >= set(names)
    return count


def scope_statements(source: str) -> Iterator[str]:
    """Yields each declaration of a C++ file, without comments and function bodies."""
    blank = re.compile(r"//[^\n]*|^[ ]*#(?:\\\n|[^\n])*|'\"'|\"(?:\\.|[^\"\\])*\"", re.MULTILINE)
    text = blank.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    begin, depth, parens = 0, 0, 0  # depth: braces of the innermost body or initialiser
    for at, char in enumerate(text):
        if char in "()":
            parens += 1 if char == "(" else -1
        if char == "{":
            head = text[begin:at]
            if depth or parens or not re.match(r"\s*(namespace|struct|class|enum|extern)\b", head):
                if not depth and not parens:
                    yield head
                depth += 1
            else:
                begin = at + 1
        elif char == "}" and depth:
            depth -= 1
            begin = begin if depth or parens else at + 1
        elif char == "}":
            begin = at + 1
        elif char == ";" and not depth and not parens:
            yield text[begin:at]
            begin = at + 1


def op_lists() -> collections.Counter[str]:
    """Counts lines of csrc/ops in function signatures, argument structs and schemas."""
    count: collections.Counter[str] = collections.Counter()
    for path in tracked(".h", ".cpp"):
        if ROOT / "csrc/ops" not in path.parents:
            continue
        source = path.read_text(encoding="utf-8")
        for head in map(str.strip, scope_statements(source)):
            fields = head.startswith("OMNIATTN_FIELDS")
            function = re.match(r"[^=(]*\w\(", head) or "operator" in head
            if fields or (function and not re.match(r"using\b|const (Registry|PathTable)\b", head)):
                signature = head if fields else head.split("\n      :")[0].split("\n    :")[0]
                count["structs" if fields else "signatures"] += signature.count("\n") + 1
                if not fields and "\n" in signature:
                    count["signatures of several lines"] += signature.count("\n") + 1
        registry = source[source.find("const Registry registry(") :]
        schemas = re.findall(r'^.*"[^"\n]*\b(?:Tensor|bool|int|float)\b.*$', registry, re.MULTILINE)
        count["schemas"] += len(schemas) if "const Registry registry(" in source else 0
    return count


def build_seconds(folder: Path) -> collections.Counter[str]:
    """Returns the seconds of each target in the last run of ninja in a folder."""
    found: collections.Counter[str] = collections.Counter()
    for line in (folder / ".ninja_log").read_text().splitlines()[1:]:
        begin, end, _, output, _ = line.split("\t")
        target = re.match(r"(?:.*/)?CMakeFiles/([\w]+)\.dir/", output)
        found[target[1] if target else "links"] += (int(end) - int(begin)) / 1000
    return found


def call_microseconds() -> Iterator[tuple[str, float, float]]:
    """Yields name, our and torch's microseconds per tiny call, on one thread without gradients."""
    import torch
    from torch.nn import functional as nnf
    from torch.utils.benchmark import Timer

    from omniattn import functional

    torch.set_num_threads(1)
    q = torch.randn(1, 4, 2, 8)
    transposed = q.transpose(1, 2)
    x, weight, norm = torch.randn(4, 16), torch.randn(16, 16), torch.ones(16)
    pairs = {
        "attention": (
            lambda: functional.attention(q, q, q),
            lambda: nnf.scaled_dot_product_attention(transposed, transposed, transposed),
        ),
        "linear": (lambda: functional.linear(x, weight), lambda: nnf.linear(x, weight)),
        "swiglu": (lambda: functional.swiglu(x, x), lambda: nnf.silu(x) * x),
        "rms_norm": (
            lambda: functional.rms_norm(x, norm),
            lambda: nnf.rms_norm(x, (16,), norm),
        ),
    }
    with torch.no_grad():
        for name, functions in pairs.items():
            ours, torchs = (
                Timer("f()", globals={"f": f}).blocked_autorange(min_run_time=0.3).median * 1e6
                for f in functions
            )
            yield name, ours, torchs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", action="store_true", help="time calls on tiny problems")
    parser.add_argument("--build", type=Path, help="a build folder of ninja")
    parser.add_argument(
        "--comments", action="store_true", help="list comments and sentences, nothing else"
    )
    given = parser.parse_args()
    found = pronoun_comments()
    sentences = pronoun_sentences()
    if given.comments:
        print(*found, *sentences, sep="\n")
        return
    print("files in the largest folders:", *(f"{d} {n}" for d, n in folder_sizes().most_common(12)))
    for package in ("functional", "modules"):
        arrows = room_imports(package)
        print(f"{package}: {len(arrows)} arrows between rooms, {sum(arrows.values())} names")
    for names in ("q k v", "scale initial_state cu_seqlens", "scale softcap dropout_p"):
        print(f"signatures with {names}: {signatures_with(*names.split())}")
    print("lines of csrc/ops:", *(f"{kind} {lines}" for kind, lines in op_lists().items()))
    print("comments that begin with a pronoun:", len(found))
    print("sentences of pages that begin with a pronoun:", len(sentences))
    if given.build:
        seconds = build_seconds(given.build)
        print("build:", f"{sum(seconds.values()):.0f} s of one core:")
        print(*(f"  {target} {s:.0f} s" for target, s in seconds.most_common()), sep="\n")
    if given.calls:
        for name, ours, torchs in call_microseconds():
            print(f"{name}: {ours:.1f} us, torch {torchs:.1f} us")


if __name__ == "__main__":
    main()
