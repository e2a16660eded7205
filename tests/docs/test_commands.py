"""Check that every command on every page exists with the options it uses, and that every configuration is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from proxy.cli.commands import app
from proxy.engines.scripted.script import read_script
from proxy.settings import load_settings
from tests.docs.blocks import (
    EXAMPLE_PAGES,
    FILE,
    PROGRAM,
    SHELL,
    Block,
    blocks_of,
    commands_of,
    inline_commands,
    pages,
    words_of,
)
from tests.docs.markdown import ROOT
from tests.docs.test_reference import PROGRAMS
from trainer.algorithm.presets import resolve
from trainer.algorithm.trial import try_functions
from trainer.config import load_runs

FOLLOWED_PAGES = {**pages(), **{str(path.relative_to(ROOT)): path for path in EXAMPLE_PAGES}}
COMMAND_LINE: Any = typer.main.get_command(app)
ALL_PAGES = FOLLOWED_PAGES | {str(path.relative_to(ROOT)): path for path in (ROOT / "docs" / "agents").glob("*.md")}
MOST_NOT_RUN = 14
"""Bound on blocks that are not run, over all pages. Correct a page that cannot be followed before raising this
number."""
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_ABBREVIATED = {"…", "...", "sft|dpo|reward-model"}


def not_run() -> list[tuple[str, Block]]:
    return [
        (name, block)
        for name, page in FOLLOWED_PAGES.items()
        for block in blocks_of(page.read_text())
        if block.reason
    ]


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    listed = [f"{name}:{block.line}: {block.reason}" for name, block in not_run()]
    assert len(listed) <= MOST_NOT_RUN, "\n".join(listed)
    for line in listed:
        assert len(line.partition(": ")[2].split()) >= 3, f"a reason says what is missing here: {line}"


@pytest.mark.parametrize("name", FOLLOWED_PAGES)
def test_every_command_of_a_block_exists_with_its_options(name: str) -> None:
    for block in blocks_of(FOLLOWED_PAGES[name].read_text()):
        if block.language == SHELL:
            for command in commands_of(block.code):
                check(words_of(command), f"{name}:{block.line}")


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_command_in_a_sentence_exists_with_its_options(name: str) -> None:
    for command in inline_commands(ALL_PAGES[name].read_text()):
        check(words_of(command), f"{name}: {command}")


@pytest.mark.parametrize("name", FOLLOWED_PAGES)
def test_every_configuration_on_a_page_is_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(FOLLOWED_PAGES[name].read_text()):
        if block.language == PROGRAM and block.title is not None:
            (tmp_path / block.title).write_text(block.code)  # which the configuration may name
        if block.language != FILE:
            continue
        file = tmp_path / "page.toml"
        file.write_text(block.code)
        if "[[rule]]" in block.code:
            assert read_script(file).rule
        else:
            load_settings(file)
            for settings in load_runs(file, {}, {}).values():
                try_functions(resolve(settings.algorithm))


def test_extras_are_installed_from_the_clone() -> None:
    """base-rl is not on PyPI, so `pip install base-rl[EXTRA]` would fail."""
    sources = [*(ROOT / "proxy").rglob("*.py"), *(ROOT / "trainer").rglob("*.py"), *ALL_PAGES.values()]
    wrong = [str(path) for path in sources if re.search(r"pip install[^\n]*base-rl\[", path.read_text())]
    assert not wrong


def check(words: list[str], place: str) -> None:
    """Raise AssertionError if a command of base-rl does not exist or lacks one of the options."""
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "base-rl":
        check_command(arguments, place)
    elif program == "make":
        for word in arguments:
            assert "=" in word or word in TARGETS, f"{place}: make has no target {word!r}"
    elif program in ("python", "python3") and arguments[:2] == ["-m", "proxy.cli"]:
        check_command(arguments[2:], place)
    elif program in ("python", "python3") and arguments[:1] == ["-m"]:
        check_program(arguments[1:], place)


def check_command(arguments: list[str], place: str) -> None:
    command, path = COMMAND_LINE, "base-rl"
    rest = list(arguments)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        if not rest or rest[0] in _ABBREVIATED or rest[0].startswith("-"):
            return
        word = rest.pop(0)
        assert word in command.commands, f"{place}: there is no `{path} {word}`"
        command, path = command.commands[word], f"{path} {word}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if path == "base-rl fit":
        kind = next((word for word in rest if word in ("sft", "dpo", "kto", "reward-model")), "sft")
        known |= options_of(f"python -m trainer fit {kind}")
    if path == "base-rl plan":
        known |= options_of("python -m trainer plan")
    for word in rest:
        if word.startswith("--") and word != "--help":
            assert word.partition("=")[0].rstrip(",.;:") in known, f"{place}: `{path}` has no option {word}"


def check_program(arguments: list[str], place: str) -> None:
    matching = [name for name in PROGRAMS if f"python -m {' '.join(arguments)} ".startswith(f"{name} ")]
    if not matching:
        module = ROOT / arguments[0].replace(".", "/")
        assert module.is_dir() or module.with_suffix(".py").is_file() or arguments[0] in ("pip", "pytest"), place
        return
    known = options_of(max(matching, key=len))
    for word in arguments:
        if word.startswith("--") and word != "--help":
            assert word.partition("=")[0] in known, f"{place}: no option {word}"


def options_of(program: str) -> set[str]:
    """Return the options that the program's own help lists."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        PROGRAMS[program](["--help"])
    return set(re.findall(r"--[a-z-]+", said.getvalue()))
