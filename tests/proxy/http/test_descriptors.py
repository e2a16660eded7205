from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from proxy import machine
from proxy.http.descriptors import DescriptorWatch


async def test_a_shortage_of_descriptors_and_its_end_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = [10, 95, 99, 80, 96, None]
    monkeypatch.setattr(machine, "descriptor_limit", lambda: 100)
    monkeypatch.setattr(machine, "open_descriptors", lambda: used.pop(0))
    watch = DescriptorWatch()
    with capture_logs() as logs:
        while used:
            await watch.check()
    assert [(entry["log_level"], entry["open"]) for entry in logs] == [("warning", 95), ("info", 80), ("warning", 96)]
    assert "ulimit -n" in logs[0]["event"]
