"""Print the dependencies that pyproject.toml declares, with those of the named extras, one per line.

`python requirements.py pyproject.toml EXTRA…` lets an image install them before the code is copied into it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(path: Path, extras: list[str]) -> None:
    project = tomllib.loads(path.read_text())["project"]
    required = [
        *project["dependencies"],
        *(each for name in extras for each in project["optional-dependencies"][name]),
    ]
    sys.stdout.write("".join(f"{each}\n" for each in required))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
