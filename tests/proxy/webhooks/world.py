"""Webhooks on a real store, with a receiver on loopback that a test can let fail, and a clock that tests move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import select

from proxy.database.tables import DEFAULT_PROJECT_ID, WebhookRow
from proxy.database.unit_of_work import Database
from proxy.jobs.running import Outcome
from proxy.lifecycle.events import append_event
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.settings import OutboundSettings
from proxy.webhooks.delivering import Delivery
from proxy.webhooks.following import WebhookFollower
from proxy.webhooks.service import WebhookRequest, WebhookService
from proxy.webhooks.views import NewSecret
from tests.proxy.jobs.world import Jobs
from tests.proxy.outbound.targets import LOOPBACK, Received, Target, target

__all__ = ["DEFAULT_PROJECT_ID", "INSTALLATION", "Webhooks", "open_webhooks"]

INSTALLATION = b"i" * 32
"""The secret of the installation."""


class Webhooks:
    """The webhooks of a store. `status` is the answer of the receiver, at `url`."""

    def __init__(self, database: Database, seconds: float) -> None:
        self.jobs = Jobs(database)
        self.database, self.clock, self.signals = database, self.jobs.clock, self.jobs.signals
        outbound = OutboundSettings(allow=(LOOPBACK,), timeout_seconds=seconds)
        client = self.client = Client(outbound, clock=self.clock)
        secrets = SigningSecrets(INSTALLATION)
        self.service = WebhookService(database, client, secrets, self.jobs.service, self.signals, self.clock)
        self.follower = WebhookFollower(database, self.signals, self.clock)
        self.jobs.kinds.register(Delivery(database, client, secrets, self.signals, self.clock).kind())
        self.runner = self.jobs.runner()
        self.status = 200
        self.receiver = Target()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}/hook"

    @property
    def received(self) -> list[Received]:
        return self.receiver.requests

    @property
    def types(self) -> list[str]:
        """The types of the messages that arrived, in order."""
        return [json.loads(request.body)["type"] for request in self.received]

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        """Answer with `status`; never if it is 0."""
        if self.status == 0:
            await asyncio.Event().wait()
        writer.write(f"HTTP/1.1 {self.status} X\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()

    async def create(self, *events: str, **scope: Any) -> NewSecret:
        return await self.service.create(WebhookRequest(url=self.url, events=events or ("*",), **scope))

    async def happen(self, kind: str, *, run_id: str | None = None, **data: Any) -> None:
        """Append an event to the log."""
        now = self.clock()
        await self.database.commit(
            lambda connection: append_event(connection, run_id=run_id, kind=kind, data=data, now=now)
        )

    async def deliver(self) -> list[Outcome]:
        """Follow the log and run the deliveries that are due, once."""
        await self.follower.follow()
        return await self.jobs.run_due(self.runner)

    async def row(self, webhook_id: str) -> Any:
        statement = select(*WebhookRow.__table__.columns).where(WebhookRow.id == webhook_id)
        return await self.database.read(lambda connection: connection.execute(statement).one())


@asynccontextmanager
async def open_webhooks(database: Database, *, seconds: float = 5.0) -> AsyncIterator[Webhooks]:
    webhooks = Webhooks(database, seconds)
    try:
        async with target(webhooks.answer) as receiver:
            webhooks.receiver = receiver
            yield webhooks
    finally:
        await webhooks.client.aclose()
