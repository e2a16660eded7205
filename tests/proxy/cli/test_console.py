"""Texts written by others reach the terminal only as plain text."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from proxy.cli import console
from proxy.cli.commands import main  # noqa: F401  (all commands are loaded: see the last test)
from proxy.cli.console import SafeConsole
from proxy.cli.drawing import health_table, transcript
from proxy.cli.rewards_commands import ledger_table, revised_table
from tests.proxy.contract.test_visible import ANY, harmless

HOSTILE = st.one_of(
    ANY,
    st.sampled_from(
        [
            "\x1b]0;owned\x07", "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "\x9b2J", "\x1b[2J\x1b[H",
            "[red]x[/]",
            "[link=http://evil]x[/link]", "[/]", ":smile:", "\u202egnp.exe", "a\r\x08b", "\x1bP+q544e\x1b\\",
        ]
    ),
)  # fmt: skip
_OURS = re.compile("\x1b\\[[0-9;]*m")
"""Colours, the only escape sequences that the console itself writes here."""


def shown(*things: RenderableType) -> str:
    """Return the text on a terminal with colours, without the colours' sequences."""
    out = io.StringIO()
    terminal = SafeConsole(file=out, force_terminal=True, width=200, color_system="truecolor")
    for thing in things:
        terminal.print(thing)
    return _OURS.sub("", out.getvalue())


def entry(text: str) -> dict[str, Any]:
    return {
        "session_id": text, "external_id": text, "turn_id": text, "name": text, "value": 1.0, "source": text,
        "created_at": 0.0,
        "superseded": False, "used_by": None, "after_training": True, "comment": text,
    }  # fmt: skip


def revised(text: str) -> dict[str, Any]:
    return {
        "session_id": text, "external_id": text, "version": 1, "reward_then": 0.0, "reward_now": 1.0,
        "turns": [], "revised_at": 0.0,
        "entries": [entry(text)],
    }  # fmt: skip


def health(text: str) -> dict[str, Any]:
    run = {"name": text, "state": text, "serving_version": 1, "head_version": 1, "trainer": text}
    engine = {"name": text, "state": text, "versions": {text: 1}, "url": text}
    return {
        "ready": True, "database": text, "database_integrity": text,
        "database_seconds": 0.1, "engine_ready": False, "disk_free_bytes": None,
        "runs": [run], "problems": [text], "engines": [engine, engine],
    }  # fmt: skip


def conversation(text: str) -> dict[str, Any]:
    call = {"function": {"name": text, "arguments": json.dumps({text: text})}}
    roles = ("user", "tool", "assistant")
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role in roles]
    return {"messages": [*messages, {"role": "assistant", "tool_calls": [call]}], "reward": 1.0}


def cells(text: str) -> RenderableType:
    table = Table(title=Text(text))
    table.add_column(text)
    table.add_row(text)
    table.add_row(Panel(Text(text, style="bold")))
    return table


VIEWS: tuple[Callable[[str], RenderableType], ...] = (
    lambda text: text,
    lambda text: Text(text, style="red"),
    cells,
    lambda text: ledger_table([entry(text)], 1.0),
    lambda text: revised_table([revised(text)], 1.0),
    lambda text: health_table(health(text)),
    lambda text: transcript("t", conversation(text)),
)


@pytest.mark.parametrize("view", VIEWS)
@given(text=HOSTILE)
def test_no_view_sends_what_a_terminal_obeys(view: Callable[[str], RenderableType], text: str) -> None:
    assert harmless(shown(view(text)))


def test_markup_and_names_of_emoji_are_text() -> None:
    text = "[red]x[/] [link=http://evil]y[/link] :smile: [too] long"
    assert text in shown(text)
    assert "[red]x[/]" in shown(ledger_table([entry("[red]x[/]")], 1.0))
    assert ":smile:" in shown(ledger_table([entry(":smile:")], 1.0))


def test_a_live_picture_goes_the_same_way() -> None:
    out = io.StringIO()
    terminal = SafeConsole(file=out, force_terminal=True, width=80)
    with Live(Text("\x1b]0;owned\x07"), console=terminal, auto_refresh=False):
        pass
    assert "\x1b]" not in out.getvalue()
    assert "\\u001b]0;owned" in out.getvalue()


@given(value=st.dictionaries(ANY, HOSTILE))
def test_json_for_programs_is_safe_and_the_same(value: dict[str, str]) -> None:
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, width=80).print_json(json.dumps(value))
    text = _OURS.sub("", out.getvalue())
    assert harmless(text)
    assert json.loads(text) == json.loads(json.dumps(value))


def test_errors_of_servers_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise console.Refused("the server says \x1b]0;owned\x07 [bold]x[/]")

    with pytest.raises(SystemExit):
        console.finish(refuse)
    assert capsys.readouterr().err == "error: the server says \\u001b]0;owned\\u0007 [bold]x[/]\n"


def test_the_consoles_of_all_commands_are_safe() -> None:
    """A second console made elsewhere would bypass the escaping."""
    import sys

    from rich.console import Console

    ours = [module for name, module in sys.modules.items() if name.startswith("proxy.")]
    found = {id(value): value for module in ours for value in vars(module).values() if isinstance(value, Console)}
    assert {id(console.out), id(console.errors)} == set(found)
    assert all(isinstance(value, SafeConsole) for value in found.values())
