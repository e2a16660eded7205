"""Ids of jobs through Celery and Redis. Celery is imported only where a broker is configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

TASK = "base_rl.job"
"""The name of the one task of Celery; its only argument is a job's id."""

# Seconds within which Redis must accept a connection, and answer. The dispatcher tries again every few seconds.
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5.0


class BrokerAway(Exception):
    """The broker cannot be reached, or refused. The message is the driver's, without the address."""


class Broker(Protocol):
    """A queue of job ids. Its methods block, and raise BrokerAway."""

    def queued(self) -> int:
        """Return how many ids wait in the queue."""
        ...

    def send(self, job_ids: Sequence[str]) -> None:
        """Send ids, in order."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def celery_app(url: str, queue: str) -> Any:
    """Return Celery's application, for sending and for workers.

    Results and errors are recorded with the jobs, so there is no result backend. Messages are acknowledged when a
    worker receives them: a message that is lost with its worker is found by the sweep, whereas Celery would deliver
    it again an hour later.
    """
    from celery import Celery  # type: ignore[import-untyped]

    app = Celery("base-rl", broker=url, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_ignore_result=True,
        task_acks_late=False,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,  # for Flower
        task_send_sent_event=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # a worker waits for its Redis as long as it takes
        broker_connection_timeout=_CONNECT_SECONDS,
        broker_transport_options={
            "socket_connect_timeout": _CONNECT_SECONDS,
            "socket_timeout": _ANSWER_SECONDS,
            "socket_keepalive": True,
        },
    )
    return app


class CeleryBroker:
    """Sends ids as Celery's tasks."""

    def __init__(self, url: str, queue: str) -> None:
        self._app = celery_app(url, queue)
        self._url = url
        self._queue = queue

    def queued(self) -> int:
        try:
            with self._app.connection_or_acquire() as connection:
                return int(connection.default_channel.client.llen(self._queue))
        except Exception as error:
            raise self._away(error) from error

    def send(self, job_ids: Sequence[str]) -> None:
        try:
            # One connection for all. Without Celery's own retries: the dispatcher has a place for failed ids.
            with self._app.producer_or_acquire() as producer:
                for job_id in job_ids:
                    self._app.send_task(
                        TASK, args=[job_id], queue=self._queue, producer=producer, retry=False, ignore_result=True
                    )
        except Exception as error:
            raise self._away(error) from error

    def close(self) -> None:
        self._app.close()

    def _away(self, error: Exception) -> BrokerAway:
        # kombu and redis raise errors of many classes, and some are of sockets. No connection is used again after an
        # error, because Redis may have restarted. A pool that was closed stays closed: a new application has its own.
        self._app.close()
        self._app = celery_app(self._url, self._queue)
        return BrokerAway(f"{type(error).__name__}: {error}")
