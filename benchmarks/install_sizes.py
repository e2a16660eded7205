"""Sizes on disk of base-rl without extras and of what each extra adds, counted in this environment.

    .venv/bin/python -m benchmarks.install_sizes

An extra is counted with all that its packages need and base-rl alone does not.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("embedded", "train", "demo", "export", "object-store", "tensorboard")
_MB = 1_000_000


def needed(name: str, extras: frozenset[str] = frozenset(), found: set[tuple[str, str]] | None = None) -> set[str]:
    """Return the distributions that `name` with these extras needs, itself among them."""
    found = set() if found is None else found
    for extra in ("", *extras):
        if (canonicalize_name(name), extra) in found:
            continue
        found.add((canonicalize_name(name), extra))
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            # A requirement of an extra names that extra in its marker; those of the package itself name none.
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed(requirement.name, frozenset(requirement.extras), found)
    return {each for each, _ in found}


def size(name: str) -> int:
    """Return the bytes of a distribution's files."""
    files = importlib.metadata.files(name) or ()
    return sum(Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file())


def main() -> None:
    base = needed("base-rl")
    print(f"{'base-rl':<12} {sum(map(size, base)) / _MB:6.0f} MB  {len(base)} packages")
    for extra in EXTRAS:
        more = needed("base-rl", frozenset({extra})) - base
        print(f"+ {extra:<10} {sum(map(size, more)) / _MB:6.0f} MB  {len(more)} packages")


if __name__ == "__main__":
    main()
