"""Client of the operating API for the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import httpx

_TIMEOUT_S = 10.0
# Seconds without data after which a transfer of many rows is abandoned.
_STREAM_TIMEOUT_S = 120.0
# Sessions per page: the API's maximum.
_PAGE = 200


class ProxyUnreachable(Exception):
    """No base-rl answers at the address, or it refuses the key. The message says what to do."""


class Operations:
    """Client of a proxy at `base_url` (without `/v1`), with an admin key; without one, it can only ask whether a
    proxy is alive. Methods raise ProxyUnreachable."""

    def __init__(self, base_url: str, key: str | None) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=_TIMEOUT_S)

    async def __aenter__(self) -> Operations:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def runs(self) -> list[dict[str, Any]]:
        return await self._list("/api/v1/runs", "runs")

    async def run(self, name: str) -> dict[str, Any]:
        return await self._get(_path_of(name))

    async def create_run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("/api/v1/runs", {}, json.dumps(body).encode(), label="the new run")

    async def clone_run(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send(f"{_path_of(name)}/clone", {}, json.dumps(body).encode(), label="the new run")

    async def change_run(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        return await self.send(_path_of(name), {}, content, label=f"the run {name}", method="PATCH")

    async def switch_run(self, name: str, change: str, reason: str | None = None) -> dict[str, Any]:
        """Make one of the changes `pause`, `resume`, `archive` and `unarchive`."""
        query = {"reason": reason} if reason is not None else {}
        return await self.send(f"{_path_of(name)}/{change}", query, b"", label=f"the run {name}")

    async def delete_run(self, name: str) -> None:
        """Delete a run with all its data."""
        await self._ask("DELETE", f"{_path_of(name)}?confirm={quote(name, safe='')}")

    async def curves(self, name: str) -> dict[str, Any]:
        return await self._get(f"/api/v1/runs/{name}/curves")

    async def sessions(self, run: str, wanted: Mapping[str, str], limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return up to `limit` sessions, newest first, and whether there may be more.

        `wanted` are the filters of GET /api/v1/runs/{run}/sessions, whose pages are followed.
        """
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = {"limit": str(min(limit - len(found), _PAGE)), **({} if cursor is None else {"cursor": cursor})}
            answer = await self._get(f"/api/v1/runs/{quote(run, safe='')}/sessions?{urlencode({**wanted, **page})}")
            found += answer["sessions"]
            cursor = answer["next_cursor"]
            if cursor is None or len(found) >= limit:
                return found, cursor is not None

    async def session(self, session_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/sessions/{quote(session_id, safe='')}")

    async def steps(self, run: str, limit: int) -> list[dict[str, Any]]:
        """Return versions and their steps, newest first."""
        return await self._list(f"/api/v1/runs/{run}/steps?limit={limit}", "steps")

    async def step(self, run: str, version: int) -> dict[str, Any]:
        return await self._get(f"/api/v1/runs/{run}/steps/{version}")

    async def claims(self, run: str, limit: int) -> list[dict[str, Any]]:
        """Return claims, the leased ones first."""
        return await self._list(f"/api/v1/runs/{run}/claims?limit={limit}", "claims")

    async def release_claim(self, run: str, claim: str) -> None:
        await self._ask("POST", f"/api/v1/runs/{run}/claims/{claim}/release")

    async def rewards(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return rewards, newest first. `wanted` are the filters of GET /api/v1/rewards."""
        return await self._list(f"/api/v1/rewards?{urlencode(wanted)}", "rewards")

    async def revised_rewards(self, run: str, limit: int) -> list[dict[str, Any]]:
        """Return trained sessions whose rewards changed since, the last revised first."""
        return await self._list(f"/api/v1/runs/{quote(run, safe='')}/rewards/revised?limit={limit}", "sessions")

    async def judges(self, run: str) -> list[dict[str, Any]]:
        return await self._list(f"/api/v1/runs/{quote(run, safe='')}/judges", "judges")

    async def rejudge(self, run: str, judge: str, sessions: Sequence[str]) -> dict[str, Any]:
        """Enqueue the judging of these sessions, or of all that have no score of the judge in its present form."""
        path = f"/api/v1/runs/{quote(run, safe='')}/judges/{quote(judge, safe='')}/rejudge"
        body = {"sessions": list(sessions)} if sessions else {}
        return await self.send(path, {}, json.dumps(body).encode(), label="the request")

    async def agreement(self, run: str, judge: str, source: str) -> dict[str, Any]:
        """Return how far the judge agrees with the rewards of the source."""
        path = f"/api/v1/runs/{quote(run, safe='')}/judges/{quote(judge, safe='')}/agreement"
        return await self._get(f"{path}?source={quote(source, safe='')}")

    async def try_judge(self, run: str, judge: str, sessions: Sequence[str]) -> dict[str, Any]:
        """Return what the judge says about these sessions."""
        path = f"/api/v1/runs/{quote(run, safe='')}/judges/{quote(judge, safe='')}/try"
        return await self.send(path, {}, json.dumps({"sessions": list(sessions)}).encode(), label="the request")

    async def judge_secret(self, run: str, judge: str) -> dict[str, Any]:
        return await self._get(f"/api/v1/runs/{quote(run, safe='')}/judges/{quote(judge, safe='')}/secret")

    async def evaluation_secret(self, run: str) -> dict[str, Any]:
        return await self.of_run(run, "versions/evaluations/secret")

    async def add_reward(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.send("/v1/feedback", {}, json.dumps(body).encode(), label="the reward")

    async def add_text(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.send("/v1/feedback", {}, json.dumps(body).encode(), label="the text")

    async def engines(self) -> list[dict[str, Any]]:
        return await self._list("/api/v1/engines", "engines")

    async def add_engine(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("/api/v1/engines", {}, json.dumps(body).encode(), label="the new engine")

    async def switch_engine(self, name: str, change: str, *, force: bool = False) -> dict[str, Any]:
        """Make one of the changes `drain` and `resume`."""
        query = {"force": "true"} if force else {}
        return await self.send(f"{_engine_path(name)}/{change}", query, b"", label=f"the engine {name}")

    async def remove_engine(self, name: str, *, force: bool) -> None:
        await self._ask("DELETE", _engine_path(name) + ("?force=true" if force else ""))

    async def versions(self, run: str) -> dict[str, Any]:
        return await self._get(f"{_path_of(run)}/versions")

    async def of_run(self, run: str, path: str) -> dict[str, Any]:
        """Return what GET /api/v1/runs/{run}/{path} answers."""
        return await self._get(f"{_path_of(run)}/{path}")

    async def version_diff(self, run: str, before: int, after: int, limit: int) -> dict[str, Any]:
        return await self._get(f"{_path_of(run)}/versions/diff?from={before}&to={after}&limit={limit}")

    async def change_versions(self, run: str, change: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make one of the changes below /versions, such as `N/pin`, `rollback` or `N/promote`."""
        content = json.dumps(body).encode()
        return await self.send(f"{_path_of(run)}/versions/{change}", {}, content, label=f"versions of the run {run}")

    async def begin_export(self, run: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an export in the background."""
        return await self.send(f"{_path_of(run)}/exports", {}, json.dumps(body).encode(), label="the export")

    async def background_export(self, run: str, name: str) -> dict[str, Any]:
        return await self.of_run(run, f"exports/{quote(name, safe='')}")

    async def keys(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return keys, newest first. `wanted` are the filters of GET /api/v1/keys."""
        return await self._list(f"/api/v1/keys?{urlencode(wanted)}", "keys")

    async def own_key(self) -> dict[str, Any]:
        return await self._get("/api/v1/keys/self")

    async def create_key(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("/api/v1/keys", {}, json.dumps(body).encode(), label="the new key")

    async def key(self, key_id: str) -> dict[str, Any]:
        return await self._get(_key_path(key_id))

    async def change_key(self, key_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        return await self.send(_key_path(key_id), {}, content, label=f"the key {key_id}", method="PATCH")

    async def rotate_key(self, key_id: str, grace_seconds: float) -> dict[str, Any]:
        body = json.dumps({"grace_seconds": grace_seconds}).encode()
        return await self.send(f"{_key_path(key_id)}/rotate", {}, body, label="the key")

    async def revoke_key(self, key_id: str) -> None:
        await self._ask("DELETE", _key_path(key_id))

    async def limits(self) -> list[dict[str, Any]]:
        return await self._list("/api/v1/limits", "limits")

    async def projects(self) -> list[dict[str, Any]]:
        return await self._list("/api/v1/projects", "projects")

    async def project(self, name: str) -> dict[str, Any]:
        return await self._get(_project_path(name))

    async def create_project(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("/api/v1/projects", {}, json.dumps(body).encode(), label="the new project")

    async def change_project(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        return await self.send(_project_path(name), {}, content, label=f"the project {name}", method="PATCH")

    async def delete_project(self, name: str) -> None:
        await self._ask("DELETE", _project_path(name))

    async def jobs(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return jobs, newest first. `wanted` are the filters of GET /api/v1/jobs."""
        return await self._list(f"/api/v1/jobs?{urlencode(wanted)}", "jobs")

    async def job_kinds(self) -> dict[str, Any]:
        return await self._get("/api/v1/jobs/kinds")

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self._get(f"/api/v1/jobs/{quote(job_id, safe='')}")

    async def change_job(self, job_id: str, change: str) -> dict[str, Any]:
        """Make one of the changes `retry` and `cancel`."""
        return await self.send(f"/api/v1/jobs/{quote(job_id, safe='')}/{change}", {}, b"", label=f"the job {job_id}")

    async def retry_dead_jobs(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        return await self.send("/api/v1/jobs/retry", dict(wanted), b"", label="the dead jobs")

    async def webhooks(self, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return webhooks. `wanted` are the filters of GET /api/v1/webhooks."""
        return await self._list(f"/api/v1/webhooks?{urlencode(wanted)}", "webhooks")

    async def create_webhook(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.send("/api/v1/webhooks", {}, json.dumps(body).encode(), label="the new webhook")

    async def change_webhook(self, webhook: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        return await self.send(_webhook_path(webhook), {}, content, label="the webhook", method="PATCH")

    async def rotate_webhook(self, webhook: str, grace_seconds: float) -> dict[str, Any]:
        body = json.dumps({"grace_seconds": grace_seconds}).encode()
        return await self.send(f"{_webhook_path(webhook)}/rotate", {}, body, label="the webhook")

    async def test_webhook(self, webhook: str) -> dict[str, Any]:
        return await self.send(f"{_webhook_path(webhook)}/test", {}, b"", label="the webhook")

    async def delete_webhook(self, webhook: str) -> None:
        await self._ask("DELETE", _webhook_path(webhook))

    async def deliveries(self, webhook: str, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return deliveries, newest first. `wanted` are the filters of GET …/deliveries."""
        return await self._list(f"{_webhook_path(webhook)}/deliveries?{urlencode(wanted)}", "deliveries")

    async def delivery(self, webhook: str, delivery: str) -> dict[str, Any]:
        return await self._get(_delivery_path(webhook, delivery))

    async def redeliver(self, webhook: str, delivery: str) -> dict[str, Any]:
        return await self.send(f"{_delivery_path(webhook, delivery)}/redeliver", {}, b"", label="the delivery")

    async def health(self) -> dict[str, Any]:
        return await self._get("/api/v1/health")

    async def lines(self, path: str, query: dict[str, Any]) -> AsyncIterator[bytes]:
        """Stream an answer line by line, without the lines' ends."""
        rest = b""
        try:
            async with self._client.stream("GET", path, params=query, timeout=_STREAM_TIMEOUT_S) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise self._refusal(path, reply)
                async for chunk in reply.aiter_bytes():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def send(
        self, path: str, query: dict[str, Any], body: bytes, *, label: str = "", method: str = "POST"
    ) -> dict[str, Any]:
        """Send a body and return the answer. `label` names the body in an error."""
        try:
            reply = await self._client.request(method, path, params=query, content=body, timeout=_STREAM_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not reply.is_success:
            raise self._refusal(label or path, reply)
        answer: dict[str, Any] = reply.json()
        return answer

    async def ready(self) -> bool:
        """Return whether calls would be served now. Never raise."""
        try:
            return (await self._client.get("/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def alive(self) -> bool:
        """Return whether a proxy answers at all. Never raise."""
        try:
            return (await self._client.get("/healthz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _list(self, path: str, field: str) -> list[dict[str, Any]]:
        """Return the list in this field of the answer."""
        return list((await self._get(path))[field])

    async def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._ask("GET", path)).json()
        return answer

    async def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            reply = await self._client.request(method, path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not reply.is_success:
            raise self._refusal(path, reply)
        return reply

    def _unreachable(self, error: httpx.HTTPError) -> ProxyUnreachable:
        return ProxyUnreachable(
            f"no base-rl answers at {self.base_url} ({error or type(error).__name__}). "
            "Start one with `base-rl up --model …`, or name its address with --url"
        )

    def _refusal(self, what: str, reply: httpx.Response) -> ProxyUnreachable:
        if reply.status_code in (401, 403):
            return ProxyUnreachable(f"{self.base_url} refuses the key; pass an admin key with --api-key")
        return ProxyUnreachable(f"{self.base_url} answers {reply.status_code} for {what}: {_said(reply)}")


def _engine_path(name: str) -> str:
    return f"/api/v1/engines/{quote(name, safe='')}"


def _key_path(key_id: str) -> str:
    return f"/api/v1/keys/{quote(key_id, safe='')}"


def _project_path(name: str) -> str:
    return f"/api/v1/projects/{quote(name, safe='')}"


def _webhook_path(webhook: str) -> str:
    return f"/api/v1/webhooks/{quote(webhook, safe='')}"


def _delivery_path(webhook: str, delivery: str) -> str:
    return f"{_webhook_path(webhook)}/deliveries/{quote(delivery, safe='')}"


def _path_of(run: str) -> str:
    return f"/api/v1/runs/{quote(run, safe='')}"


def _said(reply: httpx.Response) -> str:
    """Return the message of the error envelope, or the beginning of a body without one."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:300]
