"""An import of many sessions reports its progress."""

from __future__ import annotations

import pytest

from proxy.cli import export_commands


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(export_commands, "PROGRESS_SECONDS", 0.0)
    with export_commands.import_progress() as progress:
        progress(64)
        progress(62_000)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert [line.split(" read, ")[0] for line in lines] == ["64", "62,000"]
    assert all(line.endswith(" a second") for line in lines)


def test_a_short_import_reports_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with export_commands.import_progress() as progress:
        progress(64)
    assert capsys.readouterr().err == ""
