"""Judges that are programs: verifiers over HTTP, and functions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.judges.kinds.verifier import secret_owner
from proxy.outbound.secrets import SigningSecrets
from proxy.outbound.signing import signature
from proxy.settings import JudgingSettings
from tests.database import sqlite_database
from tests.proxy.judges.world import SECRET, open_world
from tests.proxy.outbound.targets import target

MODULE = "tests.proxy.judges.judges_in_python"
LISTED = JudgingSettings(python_modules=(MODULE,))


def http(body: Any, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(text)) + text


async def test_a_verifier_gets_the_signed_session_and_answers_with_rewards(database_url: str) -> None:
    async with (
        target(http({"rewards": [{"value": 1, "comment": "compiles"}, {"name": "speed", "value": 0.5}]})) as checker,
        open_world(database_url, kind="verifier", url=f"http://127.0.0.1:{checker.port}/check") as world,
    ):
        session_id = await world.session(task="sums")
        assert await world.run_jobs() == ["done"]
        found = {row.name: (row.value, row.comment) for row in await world.rewards()}
        assert found == {"taste": (1.0, "compiles"), "speed": (0.5, "")}
        (request,) = checker.requests
        document = json.loads(request.body)
        assert (document["type"], document["session_id"], document["task"]) == ("session.judge", session_id, "sums")
        assert document["messages"][-1] == {"role": "assistant", "content": "It is 4."}
        secret = SigningSecrets(SECRET).text(secret_owner(world.store.run.id, "taste"), 1)
        headers = request.headers
        assert headers["webhook-signature"] == signature(
            secret,
            event_id=headers["webhook-id"],
            timestamp=int(headers["webhook-timestamp"]),
            body=request.body,
        )
        await world.again(session_id, "1")
        assert await world.run_jobs() == ["done"]
        assert len(checker.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http("fine"), "neither a number"),
        (http({"rewards": [{"value": 7}]}), "not from 0 to 1"),
        (http({"rewards": [{"value": 1, "turn_id": "turn_other"}]}), "no turn of the session"),
        (http({"rewards": [{"value": True}]}), "not a finite number"),
        (http({"rewards": [{"value": 1}, {"value": 0}]}), "two rewards of one name"),
        (http({"score": 1}), '"rewards" alone'),
        (http([1] * 201), "200 is the most"),
        (http("x" * (1 << 20)), "more than 1 MiB"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{"r', "no JSON"),
        (http(1, "500 Internal Server Error"), "answered 500"),
        (http(1, "307 Temporary Redirect"), "redirects are not followed"),
    ],
    ids=range(11),
)
async def test_a_verifier_that_answers_badly_leaves_no_reward(tmp_path: Path, answer: bytes, message: str) -> None:
    async with (
        target(answer) as checker,
        open_world(sqlite_database(tmp_path), kind="verifier", url=f"http://127.0.0.1:{checker.port}/") as world,
    ):
        await world.session()
        assert await world.run_jobs() == ["failed"]
        assert await world.rewards() == []
        assert message in (await world.judgements())[0].error


async def test_a_verifier_that_hangs_or_is_private(tmp_path: Path) -> None:
    async def hang(_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async with (
        target(hang) as checker,
        open_world(
            sqlite_database(tmp_path), kind="verifier", url=f"http://127.0.0.1:{checker.port}/", timeout_seconds=0.2
        ) as world,
    ):
        await world.session()
        assert await world.run_jobs() == ["failed"]
        assert "did not answer within 0.2 seconds" in (await world.jobs())[0].error
        await world.configure(url="http://127.0.0.2/")
        world.store.clock.now += 60
        assert await world.run_jobs() == ["dead"]
        assert await world.rewards() == []


async def test_functions_give_rewards(tmp_path: Path) -> None:
    async with open_world(
        sqlite_database(tmp_path), judging=LISTED, kind="python", function=f"{MODULE}:half"
    ) as world:
        session_id = await world.session()
        assert await world.run_jobs() == ["done"]
        for number, name in enumerate(("both", "nothing")):
            await world.configure(function=f"{MODULE}:{name}")
            await world.again(session_id, str(number))
            assert await world.run_jobs() == ["done"]
        found = [(row.name, row.value, row.turn_id is None) for row in await world.rewards()]
        assert found == [("taste", 0.5, True), ("taste", 1.0, True), ("style", 0.25, False)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "neither a number"),
        ("failing", "raised ValueError"),
        ("slow", "did not return within 0.2 seconds"),
        ("absent", "cannot be imported"),
    ],
)
async def test_functions_that_fail_leave_no_reward_and_quote_no_session(
    tmp_path: Path, name: str, message: str
) -> None:
    async with open_world(
        sqlite_database(tmp_path),
        judging=LISTED,
        kind="python",
        function=f"{MODULE}:{name}",
        timeout_seconds=0.2 if name == "slow" else 10,
    ) as world:
        await world.session(answer="It is a secret.")
        assert await world.run_jobs() == ["dead" if name == "absent" else "failed"]
        (job,) = await world.jobs()
        assert message in job.error
        assert "a secret" not in job.error
        assert await world.rewards() == []


async def test_a_proxy_calls_no_function_unless_it_is_configured_to(tmp_path: Path) -> None:
    for number, (settings, message) in enumerate(
        [
            (LISTED, "base-rl worker"),
            (JudgingSettings(python_in_proxy=True), "not listed"),
            (JudgingSettings(python_modules=(MODULE,), python_in_proxy=True), None),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        async with open_world(
            sqlite_database(tmp_path / str(number)),
            judging=settings,
            in_proxy=True,
            kind="python",
            function=f"{MODULE}:half",
        ) as world:
            await world.session()
            assert await world.run_jobs() == ["done" if message is None else "dead"]
            (job,) = await world.jobs()
            assert message is None or message in job.error
