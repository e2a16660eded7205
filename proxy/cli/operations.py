"""The operating API as the command line uses it: what is live in a run, and whether the parts are well."""

from __future__ import annotations

from typing import Any

import httpx

_TIMEOUT_S = 10.0


class ProxyUnreachable(Exception):
    """No base-rl answers at the address, or it refuses the key. The message says what to do."""


class Operations:
    """`base_url` without `/v1`; `key` an admin key. Methods raise ProxyUnreachable."""

    def __init__(self, base_url: str, key: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self._base_url, headers={"authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S
        )

    async def __aenter__(self) -> Operations:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def runs(self) -> list[dict[str, Any]]:
        answer = await self._get("/api/v1/runs")
        runs: list[dict[str, Any]] = answer["runs"]
        return runs

    async def run(self, name: str) -> dict[str, Any]:
        return await self._get(f"/api/v1/runs/{name}")

    async def curves(self, name: str) -> dict[str, Any]:
        return await self._get(f"/api/v1/runs/{name}/curves")

    async def health(self) -> dict[str, Any]:
        return await self._get("/api/v1/health")

    async def ready(self) -> bool:
        """Whether calls would be served now. Never raises."""
        try:
            return (await self._client.get("/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = await self._client.get(path)
        except httpx.HTTPError as error:
            raise ProxyUnreachable(
                f"no base-rl answers at {self._base_url} ({error or type(error).__name__}). "
                "Start one with `base-rl up --model …`, or name its address with --url"
            ) from error
        if reply.status_code in (401, 403):
            raise ProxyUnreachable(f"{self._base_url} refuses the key; pass an admin key with --api-key")
        if reply.status_code != 200:
            raise ProxyUnreachable(f"{self._base_url}{path} answers {reply.status_code}: {reply.text[:300]}")
        answer: dict[str, Any] = reply.json()
        return answer
