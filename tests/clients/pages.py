"""A page of docs/agents as something to be followed: what it installs, which files it writes, what it runs.

A page has these blocks of code, and the test does with them what a reader would:

- ```bash below the heading `Install`: run once, in the client's own environment;
- ```LANGUAGE title="NAME": a file of that name (a path may begin with `~/`), in an empty folder;
- every other ```bash: run in that folder, one after the other in one shell;
- ```text: something to look at.

Nothing is replaced but the address and the key: base-rl's default address, and the key as `base-rl up` abbreviates
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT

PAGES = ROOT / "docs" / "agents"
ADDRESS = "http://127.0.0.1:8080"
KEY = "rl-run-…"

_BLOCK = re.compile(
    r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```\s*$|^#{2,} +(?P<heading>.+?) *$", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'^(?P<language>\w+)(?: +title="(?P<title>[^"]+)")?$')
_INSTALL = "Install"


@dataclass(frozen=True, kw_only=True)
class Page:
    """`files` are names and contents."""

    name: str
    install: str
    files: dict[str, str]
    commands: str

    def pointed_at(self, address: str, key: str) -> Page:
        """The page with the address and the key of a running base-rl."""

        def point(text: str) -> str:
            return text.replace(ADDRESS, address).replace(KEY, key)

        files = {name: point(content) for name, content in self.files.items()}
        return Page(name=self.name, install=self.install, files=files, commands=point(self.commands))

    def write_files(self, folder: Path, home: Path) -> None:
        for name, content in self.files.items():
            path = home / name.removeprefix("~/") if name.startswith("~/") else folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def read_page(name: str) -> Page:
    """The page docs/agents/NAME.md. Raises ValueError for a block that no reader would know what to do with."""
    return parse_page(name, (PAGES / f"{name}.md").read_text())


def parse_page(name: str, text: str) -> Page:
    install: list[str] = []
    commands: list[str] = []
    files: dict[str, str] = {}
    heading = ""
    for found in _BLOCK.finditer(text):
        if found["heading"] is not None:
            heading = found["heading"]
            continue
        info = _TITLE.match(found["info"].strip())
        if info is None:
            raise ValueError(f'{name}: a block of code says {found["info"]!r}: a language, and perhaps title="…"')
        if info["title"] is not None:
            files[info["title"]] = found["code"]
        elif info["language"] == "bash":
            (install if heading == _INSTALL else commands).append(found["code"])
        elif info["language"] != "text":
            raise ValueError(f"{name}: a block of {info['language']} has no title, so it is no file")
    if not install or not commands:
        raise ValueError(f"{name}: a page says how to install the client, and what to run")
    return Page(name=name, install="\n".join(install), files=files, commands="\n".join(commands))
