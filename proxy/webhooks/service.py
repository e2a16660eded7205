"""Create, change and delete webhooks, rotate their secrets, and deliver again. Each operation is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import new_request_id, new_webhook_id
from proxy.contract.states import JobState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.jobs.service import JobService
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.outbound.client import Client
from proxy.outbound.failures import TargetRefused
from proxy.outbound.secrets import SigningSecrets
from proxy.webhooks.messages import KIND, TEST, Message, is_event_name, is_known, iso_time, message_id, payload_of
from proxy.webhooks.repository import WebhookRepository
from proxy.webhooks.views import DeliveryView, NewSecret, WebhookView, delivery_view, webhook_view

# Each webhook costs a look at every event.
MOST_WEBHOOKS = 200
# How many events of the log are searched for a name that this version does not know.
_SEARCHED = 20_000

T = TypeVar("T")


class WebhookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a webhook to be created. Without `run_id` and `project_id` it is for the installation."""

    url: str
    events: tuple[str, ...]
    run_id: str | None = None
    project_id: str | None = None
    label: str | None = None


class WebhookChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a webhook; None leaves a property as it is."""

    url: str | None = None
    events: tuple[str, ...] | None = None
    label: str | None = None
    enabled: bool | None = None


class WebhookService:
    """Webhooks for the people who manage them. Methods raise NotFound for one that does not exist."""

    def __init__(
        self,
        database: Database,
        client: Client,
        secrets: SigningSecrets,
        jobs: JobService,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self._database = database
        self._client = client
        self._secrets = secrets
        self._jobs = jobs
        self._signals = signals
        self._clock = clock

    async def list_(self, *, run_id: str | None, project_id: str | None) -> list[WebhookView]:
        """Return webhooks, oldest first: all, those of a run, or those of a project and of its runs."""
        rows = await self._database.read(
            lambda connection: WebhookRepository(connection).list_(run_id=run_id, project_id=project_id)
        )
        return [webhook_view(row) for row in rows]

    async def get(self, webhook_id: str) -> WebhookView:
        return webhook_view(await self._database.read(lambda connection: _require(connection, webhook_id)))

    async def create(self, request: WebhookRequest) -> NewSecret:
        """Create a webhook, which sends events from now on. Raise InvalidRequest for a wrong URL or event."""
        self._check_url(request.url)
        await self._check_events(request.events)
        webhook_id, generation = new_webhook_id(), 1
        secret = self._secrets.text(webhook_id, generation)
        values = {
            **msgspec.structs.asdict(request),
            "events": list(request.events),
            "id": webhook_id,
            "created_at": self._clock(),
            "secret_generation": generation,
            "secret_fingerprint": self._secrets.fingerprint,
        }

        def write(connection: Connection) -> WebhookView:
            repository = WebhookRepository(connection)
            if repository.count() >= MOST_WEBHOOKS:
                raise Conflict(f"there are {MOST_WEBHOOKS} webhooks already: delete one that is not used")
            repository.insert(values)
            return webhook_view(_require(connection, webhook_id))

        return NewSecret(webhook=await self._database.commit(write), secret=secret)

    async def change(self, webhook_id: str, change: WebhookChange) -> WebhookView:
        """Change a webhook. Raise InvalidRequest for a wrong URL or event.

        Deliveries that wait go to the new URL. A webhook that is enabled again sends events from then on.
        """
        if change.url is not None:
            self._check_url(change.url)
        if change.events is not None:
            await self._check_events(change.events)
        given = msgspec.structs.asdict(change)
        values = {name: given[name] for name in ("url", "events", "label") if given[name] is not None}
        now = self._clock()

        def write(connection: Connection) -> WebhookView:
            repository = WebhookRepository(connection)
            _require(connection, webhook_id)
            if values:
                repository.set(webhook_id, values)
            if change.enabled is True:
                repository.enable(webhook_id)
            elif change.enabled is False:
                repository.disable(webhook_id, because="on request", now=now)
            return webhook_view(_require(connection, webhook_id))

        return await self._database.commit(write)

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook with its deliveries."""

        def write(connection: Connection) -> None:
            _require(connection, webhook_id)
            WebhookRepository(connection).delete(webhook_id)

        await self._database.commit(write)

    async def rotate(self, webhook_id: str, *, grace_seconds: float) -> NewSecret:
        """Replace the secret. For `grace_seconds`, requests are signed with the replaced one as well; one that was
        replaced before that signs no more."""
        now = self._clock()

        def write(connection: Connection) -> tuple[WebhookView, int]:
            row = _require(connection, webhook_id, lock=True)
            generation = row.secret_generation + 1
            # A secret derived from a lost secret of the installation cannot sign any more.
            has_previous = grace_seconds > 0 and row.secret_fingerprint == self._secrets.fingerprint
            values = {
                "secret_generation": generation,
                "secret_fingerprint": self._secrets.fingerprint,
                "previous_until": now + grace_seconds if has_previous else None,
            }
            WebhookRepository(connection).set(webhook_id, values)
            return webhook_view(_require(connection, webhook_id)), generation

        view, generation = await self._database.commit(write)
        return NewSecret(webhook=view, secret=self._secrets.text(webhook_id, generation))

    async def test(self, webhook_id: str) -> DeliveryView:
        """Send a message of type `webhook.test`, once, also if the webhook is disabled. Return its delivery."""
        now, part = self._clock(), new_request_id()
        message = Message(type=TEST, timestamp=iso_time(now), run=None, run_id=None, data={"webhook": webhook_id})
        payload = payload_of(webhook_id, message_id(webhook_id, part), message)

        def write(connection: Connection) -> DeliveryView:
            row = _require(connection, webhook_id)
            key = f"{webhook_id}:test:{part}"
            job_id = enqueue(connection, kind=KIND, key=key, payload=payload, now=now, run_id=row.run_id)
            return delivery_view(_require_delivery(connection, webhook_id, str(job_id)))

        return await self._enqueued(write)

    async def deliveries(
        self, webhook_id: str, *, states: Sequence[JobState] | None, below: str | None, limit: int
    ) -> list[DeliveryView]:
        """Return deliveries with ids below `below`, newest first. Confirmed ones are removed after some days."""

        def read(connection: Connection) -> list[AnyRow]:
            _require(connection, webhook_id)
            return WebhookRepository(connection).deliveries(webhook_id, states=states, below=below, limit=limit)

        return [delivery_view(row) for row in await self._database.read(read)]

    async def delivery(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Return one delivery. Raise NotFound."""
        return delivery_view(
            await self._database.read(lambda connection: _require_delivery(connection, webhook_id, delivery_id))
        )

    async def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Deliver a message again, with the same id and body. Raise NotFound, and Conflict if it is under way.

        A delivery that failed is tried again; for a confirmed one a new delivery is made.
        """
        row = await self._database.read(lambda connection: _require_delivery(connection, webhook_id, delivery_id))
        if row.state in (JobState.WAITING.value, JobState.RUNNING.value):
            raise Conflict(f"the delivery {delivery_id} is under way: wait for its result")
        if row.state != JobState.DONE.value:
            await self._jobs.retry(delivery_id)
            return await self.delivery(webhook_id, delivery_id)
        now, key = self._clock(), f"{webhook_id}:again:{new_request_id()}"

        def write(connection: Connection) -> DeliveryView:
            again = enqueue(connection, kind=KIND, key=key, payload=row.payload, now=now, run_id=row.run_id or None)
            return delivery_view(_require_delivery(connection, webhook_id, str(again)))

        return await self._enqueued(write)

    async def _enqueued(self, write: Callable[[Connection], T]) -> T:
        made = await self._database.commit(write)
        self._signals.jobs.notify()
        return made

    def _check_url(self, url: str) -> None:
        try:
            self._client.check(url)
        except TargetRefused as error:
            raise InvalidRequest(str(error), param="url") from error

    async def _check_events(self, names: Sequence[str]) -> None:
        """Raise InvalidRequest for a name that no event has, which would silently never be sent."""
        for name in names:
            if is_event_name(name) and (is_known(name) or await self._has_happened(name)):
                continue
            raise InvalidRequest(
                f"there is no event {name[:48]!r}: name kinds such as `version.committed`, domains such as `version`,"
                " or `*` for all; docs/webhooks.md lists them",
                param="events",
            )

    async def _has_happened(self, name: str) -> bool:
        # The log may have events of a newer proxy on the same store.
        return await self._database.read(
            lambda connection: WebhookRepository(connection).has_happened(name, among=_SEARCHED)
        )


def _require(connection: Connection, webhook_id: str, *, lock: bool = False) -> AnyRow:
    row = WebhookRepository(connection).find(webhook_id, lock=lock)
    if row is None:
        raise NotFound(f"there is no webhook {webhook_id!r}", param="webhook")
    return row


def _require_delivery(connection: Connection, webhook_id: str, delivery_id: str) -> AnyRow:
    row = WebhookRepository(connection).delivery(webhook_id, delivery_id)
    if row is None:
        raise NotFound(
            f"the webhook {webhook_id!r} has no delivery {delivery_id!r}; confirmed ones are removed after some days",
            param="delivery",
        )
    return row
