"""Test how the entries of a reward ledger are read while more arrive."""

from __future__ import annotations

import httpx

from benchmarks.examples.ledger import Ledger


def test_pages_are_read_until_an_entry_that_is_known() -> None:
    recorded: list[float] = []
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        """Return two entries a page, the newest first."""
        asked.append(request.url.params.get("cursor", ""))
        assert request.url.path == "/api/v1/runs/opponent/rewards"
        assert request.url.params["name"] == "sound"
        before = int(request.url.params.get("cursor", len(recorded) + 1))
        page = [{"sequence": number, "value": recorded[number - 1]} for number in range(before - 1, 0, -1)][:2]
        more = bool(page) and page[-1]["sequence"] > 1
        return httpx.Response(200, json={"rewards": page, "next_cursor": str(page[-1]["sequence"]) if more else None})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://base-rl.test")
    ledger = Ledger(client, "opponent", "sound")
    assert ledger.read() == []
    recorded += [0.0, 1.0, 0.0, 1.0, 1.0]
    assert ledger.read() == recorded
    asked.clear()
    recorded += [0.0]
    assert ledger.read() == recorded
    assert asked == [""]
