"""Measure the structure of the code: sizes of files and functions, reasons in comments, private names in tests.

`python scripts/code_figures.py`, or `make code-figures`, prints each figure with its bound. The exit status is 1 if a
bound is exceeded. `--private` lists the private names.

- Comments are lines with `#` in proxy and trainer, without directives for tools, per 100 lines that are not blank.
- A private name is `x._name` in a test, where `x` is not the test's own `self` or `cls`, or an imported `_name`.
  Underscored names that are a library's public interface, such as a named tuple's `_replace`, do not count.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CODE = ("proxy", "trainer")
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_mapping", "_C", "_functional_collectives"}
DIRECTIVES = ("# noqa", "# type:", "# pragma", "#!")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--", *folders], check=True, capture_output=True, text=True)
    return [Path(name) for name in listed.stdout.splitlines() if name.endswith(".py")]


def percentile_95(values: list[int]) -> int:
    return round(statistics.quantiles(values, n=20)[-1])


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """Yield the number of lines of each function without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            first = node.body[0]
            has_docstring = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
            yield (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def comment_count(source: str) -> int:
    comments = (
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    return sum(not comment.startswith(DIRECTIVES) for comment in comments)


def private_names(path: Path) -> Iterator[str]:
    """Yield `file:line name` for each use of another object's private name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            names = [] if owner in {"self", "cls"} else [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("_"):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in PUBLIC:
                yield f"{path}:{node.lineno} {name}"


def main() -> int:
    sources = {path: path.read_text() for path in python_files(*CODE)}
    sizes = {path: len(source.splitlines()) for path, source in sources.items()}
    functions = [length for source in sources.values() for length in function_lengths(ast.parse(source))]
    comments = sum(map(comment_count, sources.values()))
    lines = sum(bool(line.strip()) for source in sources.values() for line in source.splitlines())
    private = [use for path in python_files("tests") for use in private_names(path)]
    largest = max(sizes, key=sizes.__getitem__)
    figures = [
        (f"lines of the largest file ({largest})", sizes[largest], 400),
        ("lines of a file, 95th percentile", percentile_95(list(sizes.values())), 320),
        ("lines of a function, 95th percentile", percentile_95(functions), 30),
        ("private names of others in tests", len(private), 19),
    ]
    for name, found, bound in figures:
        print(f"{name}: {found} (at most {bound})")
    print(f"comments per 100 lines: {100 * comments / lines:.1f} (2 to 6)")
    if "--private" in sys.argv:
        print(*private, sep="\n")
    return 1 if any(found > bound for _, found, bound in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
