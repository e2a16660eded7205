"""Following the event log: events become jobs that deliver them."""

from __future__ import annotations

import asyncio
from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.webhooks.messages import KIND, Message, iso_time, message_id, payload_of, subscribes
from proxy.webhooks.repository import EVENTS_AT_ONCE, WebhookRepository

# Events that other processes append send no signal here.
_POLL_SECONDS = 1.0
# The shortest pause between two looks at the log: an agent that ends a thousand sessions a second costs five looks.
_PAUSE_SECONDS = 0.2
# The pause after an unexpected error, so that it does not fill the log.
_ERROR_SECONDS = 5.0

_LOG = logger(__name__)


class WebhookFollower:
    """Enqueues a delivery of each event for each webhook that subscribes to it. Every proxy runs one; each event is
    enqueued once."""

    def __init__(self, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def run(self) -> None:
        """Follow the log until cancelled."""
        while True:
            since = self._signals.events.count
            pause = _PAUSE_SECONDS
            try:
                await self.follow()
            except StoreUnavailable as error:
                _LOG.warning("webhooks wait for the store", error=error.message)
                pause = _ERROR_SECONDS
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("the event log could not be followed")
                pause = _ERROR_SECONDS
            await asyncio.sleep(pause)
            await self._signals.events.wait(_POLL_SECONDS, since=since)

    async def follow(self) -> int:
        """Enqueue deliveries up to the newest event. Return how many were enqueued."""
        enqueued = 0
        while webhooks := await self._database.read(lambda connection: WebhookRepository(connection).behind()):
            is_done = True
            for webhook in webhooks:
                # Read apart from the write: SQLite has one writer, and events never change.
                events, upto = await self._database.read(partial(_events_after, webhook=webhook))
                wanted = [event for event in events if subscribes(webhook.events, event.kind, event.data)]
                enqueued += await self._database.commit(
                    partial(_enqueue, webhook=webhook, events=wanted, upto=upto, now=self._clock())
                )
                is_done = is_done and len(events) < EVENTS_AT_ONCE
            if is_done:
                break
        if enqueued:
            self._signals.jobs.notify()
        return enqueued


def _events_after(connection: Connection, *, webhook: AnyRow) -> tuple[list[AnyRow], int]:
    return WebhookRepository(connection).events_after(webhook)


def _enqueue(connection: Connection, *, webhook: AnyRow, events: list[AnyRow], upto: int, now: float) -> int:
    # The place in the log first: of two proxies that read the same events, one enqueues them.
    if not WebhookRepository(connection).advance(webhook.id, before=webhook.last_event_id, to=upto):
        return 0
    for event in events:
        message = Message(
            type=event.kind,
            timestamp=iso_time(event.created_at),
            run=event.run,
            run_id=event.run_id,
            data=event.data,
        )
        payload = payload_of(webhook.id, message_id(webhook.id, str(event.id)), message)
        enqueue(connection, kind=KIND, key=f"{webhook.id}:{event.id}", payload=payload, now=now, run_id=event.run_id)
    return len(events)
