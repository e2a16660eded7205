"""The dispatcher: sends ids of due jobs to the broker, as many as the workers will soon need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.jobs.broker import Broker, BrokerAway
from proxy.jobs.kinds import JobKinds
from proxy.jobs.leasing import find_due
from proxy.jobs.repository import JobRepository
from proxy.lifecycle.signals import Signals
from proxy.log import logger

# The longest queue. It is short because whose job is next is decided here, when an id is sent: a long queue would
# delay the jobs of a run that has just come.
AHEAD = 100
# An id that no worker took within this time counts as lost, and is sent again if the queue has room.
RESEND_SECONDS = 30.0
# Pauses between searches: while there is more to send than the kinds have room for, while there is nothing to send,
# and while the broker is away.
_BUSY_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_AWAY_SECONDS = 2.0

_LOG = logger(__name__)


class JobDispatcher:
    """Sends every due job's id once, whichever proxies there are, and again if it was lost."""

    def __init__(
        self,
        broker: Broker,
        database: Database,
        kinds: JobKinds,
        signals: Signals,
        clock: Clock,
        *,
        resend_seconds: float = RESEND_SECONDS,
    ) -> None:
        self._broker = broker
        self._database = database
        self._kinds = kinds
        self._signals = signals
        self._clock = clock
        self._resend_seconds = resend_seconds
        self._is_away = False
        self._last_runs: dict[str, str] = {}

    async def run(self) -> None:
        """Send ids until cancelled."""
        while True:
            since = self._signals.jobs.count
            pause, is_over = _IDLE_SECONDS, False
            try:
                if await self.dispatch():
                    pause = _BUSY_SECONDS
                self._report(None)
            except BrokerAway as error:
                self._report(error)
                pause, is_over = _AWAY_SECONDS, True
            except StoreUnavailable as error:
                _LOG.warning("jobs wait for the store", error=error.message)
                is_over = True
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("ids of jobs could not be sent")
                is_over = True
            if is_over:  # a signal would end the pause at once, again and again
                await asyncio.sleep(pause)
            else:
                await self._signals.jobs.wait(pause, since=since)

    async def dispatch(self) -> int:
        """Send the ids of due jobs, and return how many. Raise BrokerAway, with no id marked as sent in vain."""
        queued = await asyncio.to_thread(self._broker.queued)
        if queued >= AHEAD:
            return 0
        now = self._clock()
        sent_before = now - self._resend_seconds
        found = await self._database.read(
            lambda connection: find_due(
                connection,
                self._kinds,
                before=now,
                want=AHEAD - queued,
                last_runs=self._last_runs,
                sent_before=sent_before,
            )
        )
        job_ids = [job_id for jobs in found.values() for job_id in jobs]
        if not job_ids:
            return 0
        # Marked before they are sent: a process that dies in between has lost messages, which are sent again later.
        # In the other order, it would have sent messages that every proxy sends again at once.
        marked = await self._database.commit(partial(_mark, job_ids, now, sent_before))
        try:
            await asyncio.to_thread(self._broker.send, marked)
        except BrokerAway:
            # Some may have been sent: a worker that gets an id twice finds the job leased or done.
            await self._database.commit(lambda connection: JobRepository(connection).unmark_sent(marked))
            raise
        return len(marked)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._broker.close)

    def _report(self, error: BrokerAway | None) -> None:
        """Log when the broker goes away and when it is back."""
        if error is not None and not self._is_away:
            _LOG.warning(
                "the job broker cannot be reached: workers find jobs in the database until it is back",
                error=str(error),
            )
        if error is None and self._is_away:
            _LOG.info("the job broker is back")
        self._is_away = error is not None


def _mark(job_ids: Sequence[str], now: float, sent_before: float, connection: Connection) -> list[str]:
    return JobRepository(connection).mark_sent(job_ids, now=now, sent_before=sent_before)
