"""A lease: one attempt at a job by one worker."""

from __future__ import annotations

from typing import Any

import msgspec


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of `owner` to end an attempt at a job. `attempt` counts from 1.

    `owner` is the worker's name and a random part. Every change of a running job asks for its owner, so a worker
    whose lease passed can change nothing once another one has the job.
    """

    id: str
    kind: str
    key: str
    payload: dict[str, Any]
    run_id: str | None
    attempt: int
    owner: str
