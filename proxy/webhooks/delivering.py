"""Delivering: the kind of job that posts a message to a webhook's URL."""

from __future__ import annotations

import time
from functools import partial
from typing import NoReturn

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobFailure, JobKind, JobPostponed, JobRefused, Json, RunningJob
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.outbound.client import Client
from proxy.outbound.failures import TargetFailed, TargetRefused
from proxy.outbound.secrets import SigningSecrets
from proxy.webhooks.messages import KIND, TEST
from proxy.webhooks.repository import WebhookRepository

# Fifteen attempts over about 17 hours: a receiver that is down over night misses nothing.
_ATTEMPTS = 15
_BACKOFF_SECONDS = 10.0
_LONGEST_BACKOFF_SECONDS = 6 * 3600.0
# Deliveries at the same time over all processes: half of one process's places, so that receivers that hang leave
# places for other kinds of jobs.
_CONCURRENCY = 4
# Longer than any request may take (`[outbound] timeout_seconds`).
_TIMEOUT_SECONDS = 180.0
# A webhook without a single success for this long is disabled.
DISABLE_SECONDS = 3 * 86400.0
# The pause before another worker tries a delivery that this one cannot sign.
_UNSIGNED_SECONDS = 30.0
# After a failure that took so long, this process leaves the webhook alone for a while: a receiver that hangs would
# otherwise take all places, one message after the other, and deliveries to others would wait.
SLOW_SECONDS = 2.0
REST_SECONDS = 30.0
# The status by which a receiver says that it wants no more, by Standard Webhooks.
_GONE = 410

_LOG = logger(__name__)


class Delivery:
    """Handles jobs of the kind `webhook`."""

    def __init__(
        self, database: Database, client: Client, secrets: SigningSecrets, signals: Signals, clock: Clock
    ) -> None:
        self._database = database
        self._client = client
        self._secrets = secrets
        self._signals = signals
        self._clock = clock
        self._resting_until: dict[str, float] = {}

    def kind(self) -> JobKind:
        return JobKind(
            name=KIND,
            handler=self.deliver,
            concurrency=_CONCURRENCY,
            attempts=_ATTEMPTS,
            timeout_seconds=_TIMEOUT_SECONDS,
            backoff_seconds=_BACKOFF_SECONDS,
            longest_backoff_seconds=_LONGEST_BACKOFF_SECONDS,
        )

    async def deliver(self, job: RunningJob) -> Json | None:
        """Post the job's message, and record with the webhook whether it arrived."""
        webhook_id, is_test = job.payload["webhook"], job.payload["type"] == TEST
        webhook = await self._database.read(lambda connection: WebhookRepository(connection).find(webhook_id))
        if webhook is None:
            raise JobRefused("the webhook was deleted")
        if webhook.disabled_at is not None and not is_test:
            raise JobRefused("the webhook is disabled: enable it, then deliver again")
        rest = self._resting_until.get(webhook_id, 0.0) - self._clock()
        if rest > 0 and not is_test:
            raise JobPostponed(f"the receiver is slow: {webhook.last_error}", seconds=rest)
        secrets = self._signing_secrets(webhook)
        began = time.monotonic()
        try:
            answer = await self._client.post(
                webhook.url, job.payload["body"].encode(), event_id=job.payload["event"], secrets=secrets
            )
        except (TargetRefused, TargetFailed) as error:
            if time.monotonic() - began > SLOW_SECONDS:
                self._resting_until[webhook_id] = self._clock() + REST_SECONDS
            await self._fail(webhook, str(error), is_test=is_test, is_final=isinstance(error, TargetRefused))
        else:
            if answer.problem is not None:
                is_gone = answer.status == _GONE
                await self._fail(webhook, answer.problem, is_test=is_test, is_final=is_gone, is_gone=is_gone)
        result = {"status": answer.status, "seconds": round(time.monotonic() - began, 3)}
        if is_test:
            return result
        now = self._clock()
        await job.complete(
            lambda connection: WebhookRepository(connection).record_success(webhook_id, now), result=result
        )
        return None

    def _signing_secrets(self, webhook: AnyRow) -> list[str]:
        """Return the secrets that sign now, the newest first. Raise JobPostponed on a machine that cannot sign."""
        if webhook.secret_fingerprint != self._secrets.fingerprint:
            raise JobPostponed(
                "this worker lacks the installation's secret: copy the file `secret` of the proxy's data directory "
                "into the worker's (`server.data_dir`), or rotate the webhook's secret if that file was lost",
                seconds=_UNSIGNED_SECONDS,
            )
        secrets = [self._secrets.text(webhook.id, webhook.secret_generation)]
        if webhook.previous_until is not None and self._clock() < webhook.previous_until:
            secrets.append(self._secrets.text(webhook.id, webhook.secret_generation - 1))
        return secrets

    async def _fail(
        self, webhook: AnyRow, error: str, *, is_test: bool, is_final: bool = False, is_gone: bool = False
    ) -> NoReturn:
        """Record a failed attempt, and disable the webhook after a long failure. Raise JobFailure or JobRefused."""
        if is_test:  # somebody waits for the result, and tries again at will
            raise JobRefused(error)
        now = self._clock()
        disabled = await self._database.commit(
            partial(_record_failure, webhook_id=webhook.id, error=error, is_gone=is_gone, now=now)
        )
        if disabled:
            _LOG.warning("webhook disabled", webhook=webhook.id, error=error)
            self._signals.events.notify()
        raise (JobRefused if is_final or disabled else JobFailure)(error)


def _record_failure(connection: Connection, *, webhook_id: str, error: str, is_gone: bool, now: float) -> bool:
    """Record the failure; return whether the webhook was disabled for it."""
    repository = WebhookRepository(connection)
    repository.record_failure(webhook_id, error, now)
    webhook = repository.find(webhook_id)
    if webhook is None or not (is_gone or now - webhook.failing_since >= DISABLE_SECONDS):
        return False
    because = "its receiver answered 410: it wants no more" if is_gone else f"every delivery failed for days: {error}"
    if not repository.disable(webhook_id, because=because, now=now):
        return False
    data = {"webhook": webhook_id, "label": webhook.label, "reason": because}
    append_event(connection, run_id=webhook.run_id, kind="webhook.disabled", data=data, now=now)
    return True
