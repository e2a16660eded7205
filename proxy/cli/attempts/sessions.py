"""The proxy as attempts use it: open sessions, post feedback, end sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from proxy.cli.console import Refused

_TIMEOUT_S = 30.0
# A proxy that restarts is back within seconds; after this long, a person should know.
_PATIENCE_S = 120.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_ABOUT_THE_REQUEST = (400, 413, 422)


class RequestRefused(Refused):
    """The proxy refuses what one request says; others may be accepted."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session with a key of its own. An agent needs `base_url`, `api_key` and `model`, and nothing else."""

    id: str
    base_url: str
    api_key: str
    model: str


class SessionClient:
    """Client with the key of a run or a project. Requests that may be repeated are, while the proxy is away.

    Methods raise Refused if the proxy refuses a request, or is away for two minutes.
    """

    def __init__(self, base_url: str, key: str, *, run: str, model: str) -> None:
        self._run = run
        self._model = model
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
        )

    async def __aenter__(self) -> SessionClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raise Refused unless the key may ask for the model."""
        models = (await self._ask("GET", "/v1/models", None))["data"]
        names = [model["id"] for model in models]
        if self._run not in names:
            raise Refused(f"this key cannot use the run {self._run!r}; it can use {', '.join(names) or 'none'}")

    async def open(self, *, task: str, group: str, group_size: int, count: int, purpose: str) -> list[Session]:
        """Open `count` sessions of a group of `group_size`. A repeated request may open more, which end idle."""
        body = {"run": self._run, "task": task, "purpose": purpose}
        if group_size > 1:
            body |= {"group": group, "group_size": group_size, "n": count}  # type: ignore[dict-item]
        answer = await self._ask("POST", "/v1/sessions", body)
        return [
            Session(id=one["id"], base_url=one["base_url"], api_key=one["api_key"], model=self._model)
            for one in answer.get("sessions", [answer])
        ]

    async def post(self, session: Session, items: Sequence[dict[str, Any]]) -> None:
        """Post feedback for a session. A repeated request records nothing twice."""
        bodies = [
            {
                **item,
                **({} if "turn_id" in item else {"session_id": session.id}),
                "idempotency_key": item.get("idempotency_key", f"attempt-{session.id}-{index}"),
            }
            for index, item in enumerate(items)
        ]
        await self._ask("POST", "/v1/feedback", bodies)

    async def end(self, session: Session, outcome: str) -> None:
        """End a session as `completed`, `failed` or `cancelled`."""
        await self._ask("POST", f"/v1/sessions/{session.id}/end", {"outcome": outcome})

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE_S
        pause = _FIRST_PAUSE_S
        while True:
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                problem = f"no answer ({type(error).__name__})"
            else:
                if response.is_success:
                    return response.json()
                problem = _message(response)
                if response.status_code != 429 and response.status_code < 500:
                    kind = RequestRefused if response.status_code in _ABOUT_THE_REQUEST else Refused
                    raise kind(f"{method} {path}: {problem}")
            if loop.time() + pause > until:
                raise Refused(f"{self._client.base_url}{path}: {problem}, for {_PATIENCE_S:.0f} seconds; is it up?")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
