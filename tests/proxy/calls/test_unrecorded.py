"""Model calls while the store cannot be written: refused, or answered and marked; afterwards recorded again."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection

from proxy.tokens.template import ChatTemplate
from tests.database import PostgresServer, needs_postgresql
from tests.proxy.calls.world import USER, World, open_world

REASON = "store_unavailable"
SESSION = {"x_base_rl_session": "task 7"}

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {}),
    ("completions", "/v1/completions", {"prompt": "What is 17 + 25?"}),
    ("messages", "/v1/messages", {"max_tokens": 16}),
    ("responses", "/v1/responses", {"input": "What is 17 + 25?"}),
]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server for this test alone, to be stopped and started."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@asynccontextmanager
async def serving(
    server: PostgresServer, directory: Path, template: ChatTemplate, when_unavailable: Literal["refuse", "serve"]
) -> AsyncIterator[World]:
    """A world with one recorded turn."""
    url = server.url(server.take())
    async with open_world(directory, template, url=url, when_unavailable=when_unavailable) as world:
        assert (await world.post({}, **SESSION)).status_code == 200
        yield world


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def mark(body: dict[str, Any]) -> Any:
    return body.get("base_rl", {}).get("unrecorded")


@needs_postgresql
async def test_without_its_store_a_call_is_refused_and_later_served_again(
    server: PostgresServer, tmp_path: Path, template: ChatTemplate
) -> None:
    async with serving(server, tmp_path, template, "refuse") as world:
        server.kill()
        for stream in (False, True):
            refused = await world.post({"stream": stream}, **SESSION)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == REASON
            assert float(refused.headers["retry-after"]) > 0
        server.start()
        served = await world.post({}, **SESSION)
        assert (served.status_code, "x-base-rl-unrecorded" in served.headers) == (200, False)
        assert [turn.id for turn in await world.turns()][-1] == served.headers["x-base-rl-turn"]
        assert world.seen.unrecorded == []


@needs_postgresql
async def test_with_serve_calls_are_answered_and_marked_in_every_dialect(
    server: PostgresServer, tmp_path: Path, template: ChatTemplate
) -> None:
    async with serving(server, tmp_path, template, "serve") as world:
        server.stop()
        world.store.clock.now += 60.0  # only what the store returned a minute ago is cached
        for dialect, path, body in CALLS:
            whole = await world.post(body, path, **SESSION)
            assert whole.status_code == 200, whole.text
            assert whole.headers["x-base-rl-unrecorded"] == REASON
            assert "x-base-rl-turn" not in whole.headers
            assert mark(whole.json()) == REASON
            streamed = await world.post({**body, "stream": True}, path, **SESSION)
            assert streamed.headers["x-base-rl-unrecorded"] == REASON
            last = [event.get("response", event) for event in events(streamed.text)]
            assert REASON in [mark(event) for event in last], dialect
            assert world.seen.unrecorded[-2:] == [(REASON, dialect)] * 2
        unknown = await world.post({}, authorization="Bearer rl-run-never-seen")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, REASON)

        server.start()
        world.store.clock.now += 5.0
        assert len(await world.turns()) == 1
        before = (await world.turns())[0]
        served = await world.post({"messages": [USER, {"role": "assistant", "content": "?"}, USER]}, **SESSION)
        assert "x-base-rl-unrecorded" not in served.headers
        turns = await world.turns()
        assert [turn.session_id for turn in turns] == [before.session_id] * 2


@needs_postgresql
async def test_a_repeated_key_gets_the_unrecorded_answer_again_with_its_mark(
    server: PostgresServer, tmp_path: Path, template: ChatTemplate
) -> None:
    async with serving(server, tmp_path, template, "serve") as world:
        server.stop()
        world.say("first", "second")
        first = await world.post({}, idempotency_key="one")
        again = await world.post({}, idempotency_key="one")
        assert again.json() == first.json()
        assert again.headers["x-base-rl-unrecorded"] == REASON


@needs_postgresql
async def test_a_call_that_is_sent_again_after_the_outage_opens_a_session_that_is_there(
    server: PostgresServer, tmp_path: Path, template: ChatTemplate
) -> None:
    async with serving(server, tmp_path, template, "serve") as world:
        server.stop()
        assert (await world.post({}, x_stainless_retry_count="0")).headers["x-base-rl-unrecorded"] == REASON
        server.start()
        recorded = await world.post({}, x_stainless_retry_count="1")
        assert (recorded.status_code, "x-base-rl-unrecorded" in recorded.headers) == (200, False)


def bound(pages: int | None) -> Any:
    """Limit the growth of SQLite's file to this many pages, like a full disk."""

    def work(connection: Connection) -> None:
        known = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {known + pages if pages is not None else 1 << 30}")

    return work


LONG: dict[str, Any] = {"metadata": {"noise": random.Random(7).randbytes(100_000).hex()}}
"""A request larger than the free pages."""


async def test_a_stream_that_cannot_be_recorded_has_the_mark_at_its_end(
    tmp_path: Path, template: ChatTemplate
) -> None:
    async with open_world(tmp_path, template, when_unavailable="serve") as world:
        await world.post({}, **SESSION)
        await world.store.database.commit(bound(0))
        streamed = await world.post({**LONG, "stream": True}, **SESSION)
        assert (streamed.status_code, "x-base-rl-unrecorded" in streamed.headers) == (200, False)
        chunks = events(streamed.text)
        assert [mark(chunk) for chunk in chunks] == [None] * (len(chunks) - 1) + [REASON]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert world.seen.unrecorded == [(REASON, "chat")]
        await world.store.database.commit(bound(None))
        await world.post({**LONG, "stream": True}, **SESSION)
        assert len(await world.turns()) == 2


async def test_a_full_disk_refuses_what_does_not_fit_and_nothing_is_half_written(
    tmp_path: Path, template: ChatTemplate
) -> None:
    async with open_world(tmp_path, template) as world:
        await world.post({}, **SESSION)
        await world.store.database.commit(bound(0))
        refused = await world.post(LONG, **SESSION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, REASON)
        assert "full" in refused.json()["error"]["message"]
        (session,) = await world.sessions()
        assert (session.turn_count, len(await world.turns())) == (1, 1)
        await world.store.database.commit(bound(None))
        assert (await world.post(LONG, **SESSION)).status_code == 200
        (session,) = await world.sessions()
        assert session.turn_count == 2
