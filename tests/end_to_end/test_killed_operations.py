"""kill -9 of the proxy while it creates and archives runs, loads a version, and drains an engine: it goes on after a
restart, and nothing is left half made."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.contract.identifiers import SessionId
from tests.end_to_end.installation import EXAMPLE, Installation, installation
from tests.end_to_end.test_engine_deaths import QUESTION, RUN, commit
from tests.proxy.versions.publishing import fit_request, reference

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

NAMES = [f"shop-{number}" for number in range(8)]


async def test_operations_that_a_kill_interrupts_are_done_whole_or_not_at_all(tmp_path: Path) -> None:
    async with installation(tmp_path, with_trainer=False) as found:
        headers = {"authorization": f"Bearer {found.stack.keys.admin_key}"}
        async with httpx.AsyncClient(base_url=found.stack.url, headers=headers, timeout=60) as admin:
            await kill_while_creating(found, admin)
            await kill_while_loading(found, tmp_path)
            await kill_while_archiving(found, admin)
            await kill_while_draining(found, admin)


async def kill_while_creating(found: Installation, admin: httpx.AsyncClient) -> None:
    model = str((EXAMPLE / "checkpoint").resolve())

    def create(name: str) -> Coroutine[Any, Any, httpx.Response]:
        return admin.post("/api/v1/runs", json={"name": name, "model": model})

    made = "SELECT name FROM runs WHERE name LIKE 'shop-%'"
    answered = await killed(found, map(create, NAMES), once=lambda: bool(found.ask_store(made)))
    there = {name for (name,) in found.ask_store(made)}
    assert {name for name, reply in zip(NAMES, answered, strict=True) if reply == 201} <= there
    for name in NAMES:
        again = await create(name)
        assert again.status_code == (409 if name in there else 201), again.text
    rows = found.ask_store(
        "SELECT COUNT(*), COUNT(v.version), COUNT(e.id) FROM runs r"
        " LEFT JOIN policy_versions v ON v.run_id = r.id AND v.version = 0"
        " LEFT JOIN events e ON e.run_id = r.id AND e.kind = 'run.created' WHERE r.name LIKE 'shop-%'"
    )
    assert rows == [(8, 8, 8)]


async def kill_while_loading(found: Installation, data_dir: Path) -> None:
    run_id = str(found.ask_store("SELECT id FROM runs WHERE name = ?", RUN)[0][0])
    directory = Path(shutil.copytree(EXAMPLE / "checkpoint", data_dir / "weights" / run_id / "v000001"))
    await commit(found, fit_request([SessionId("ses_1")], 0, reference(directory)))
    served = "SELECT COUNT(*) FROM events WHERE kind = 'version.served' AND run_id = ?"
    await killed(found, [], once=lambda: True)
    await found.until(lambda: found.ask_store(served, run_id) == [(1,)], what="version 1 served, once")
    async with found.client() as client:
        answer = await client.post("/v1/chat/completions", json={"model": RUN, "messages": [QUESTION]})
    assert answer.json()["system_fingerprint"] == f"{RUN}@1", answer.text


async def kill_while_archiving(found: Installation, admin: httpx.AsyncClient) -> None:
    def archive(name: str) -> Coroutine[Any, Any, httpx.Response]:
        return admin.post(f"/api/v1/runs/{name}/archive")

    archived = "SELECT name FROM runs WHERE state = 'archived'"
    answered = await killed(found, map(archive, NAMES), once=lambda: bool(found.ask_store(archived)))
    there = {name for (name,) in found.ask_store(archived)}
    assert {name for name, reply in zip(NAMES, answered, strict=True) if reply == 200} <= there
    for name in NAMES:
        assert (await archive(name)).json()["state"] == "archived"
    events = "SELECT COUNT(*) FROM events WHERE kind = 'run.archived'"
    assert found.ask_store(events) == [(8,)], "one for each run"


async def kill_while_draining(found: Installation, admin: httpx.AsyncClient) -> None:
    desired = "SELECT desired FROM engines"
    drain = admin.post("/api/v1/engines/engine/drain?force=true")
    await killed(found, [drain], once=lambda: found.ask_store(desired) != [("serving",)], until_ready=False)
    await found.until(lambda: found.ask_store(desired) == [("drained",)], what="the engine drained")
    async with found.client() as client:
        body = {"model": RUN, "messages": [QUESTION]}
        async with asyncio.timeout(60):
            while (refused := await answered_by(client, body)) is None:
                await asyncio.sleep(0.05)
        assert refused.status_code == 503, refused.text
        assert (await admin.post("/api/v1/engines/engine/resume")).status_code == 200
        await found.until_ready()
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def killed(
    found: Installation,
    requests: Any,
    *,
    once: Callable[[], bool],
    until_ready: bool = True,
) -> list[int | None]:
    """Send requests together and kill the proxy once the condition holds. Return each status; None without an
    answer."""
    restarts = found.stack.supervisor.restarts("proxy")
    sent = [asyncio.ensure_future(request) for request in requests]
    await found.until(once, what="the operation under way")
    found.kill("proxy")
    replies = await asyncio.gather(*sent, return_exceptions=True)
    assert all(isinstance(reply, httpx.Response | httpx.TransportError) for reply in replies), replies
    await found.until(lambda: found.stack.supervisor.restarts("proxy") > restarts, what="the proxy started again")
    if until_ready:
        await found.until_ready()
    return [reply.status_code if isinstance(reply, httpx.Response) else None for reply in replies]


async def answered_by(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response | None:
    """Return the answer of a proxy that is up; None while it starts."""
    try:
        return await client.post("/v1/chat/completions", json=body)
    except httpx.TransportError:
        return None
