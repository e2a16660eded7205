from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from proxy import log


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_our_lines_and_those_of_libraries_are_json_objects(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    given = log.request_id.set("req_1")
    log.logger("proxy.test").info("served", status=200)
    log.logger("proxy.test").debug("not shown")
    log.request_id.reset(given)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("library").exception("failed with %s", "grace")
    ours, theirs = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (ours["event"], ours["status"], ours["request_id"], ours["level"], ours["logger"]) == (
        "served",
        200,
        "req_1",
        "info",
        "proxy.test",
    )
    assert (theirs["event"], theirs["level"]) == ("failed with grace", "error")
    assert "ValueError: broken" in theirs["exception"]


def test_a_library_that_logs_much_is_heard_only_when_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # mlflow, which other tests of the same process import, gives this logger a handler of its own and stops
    # propagation.
    monkeypatch.setattr(logging.getLogger("alembic"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("alembic"), "propagate", True)
    log.configure("debug")
    logging.getLogger("alembic").debug("executing")
    logging.getLogger("alembic").warning("slow")
    log.logger("proxy.test").debug("shown")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["slow", "shown"]


def test_a_terminal_is_sent_text_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log.configure("info")
    try:
        raise ValueError("of a client: \x1b]0;owned\x07")
    except ValueError:
        log.logger("proxy.test").exception("failed\x1b[2J\nforged line", path="/\x9b2J", given=["\x1b"])
    said = capsys.readouterr().err
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said
    assert "\x9b" not in said
    assert "of a client: \\u001b]0;owned" in said
    assert "failed\\u001b[2J\\u000aforged line" in said
    assert "Traceback (most recent call last):\n" in said
