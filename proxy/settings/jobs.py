"""Background jobs."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, SecretStr, StringConstraints, model_validator

from proxy.settings.section import Section
from proxy.settings.urls import has_password, with_password


def _broker_url(url: str) -> str:
    """Return the URL. Errors never quote it, because it may hold a password."""
    if not re.fullmatch(r"rediss?://[^\s/]+(/\d+)?(\?[^\s]*)?", url):
        raise ValueError("the broker is a Redis: write redis://:password@host:6379/0, or rediss:// for TLS")
    return url


class JobSettings(Section):
    """Who runs background jobs, and how long finished ones stay."""

    broker: Annotated[str, AfterValidator(_broker_url)] | None = None
    """The Redis that carries ids of jobs to `base-rl worker` processes; without it, the proxies run jobs."""
    broker_password: SecretStr | None = None
    """The password of that Redis, for a `broker` that has none."""
    queue: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "base-rl"
    """The list in Redis; installations that share a Redis need different ones."""
    concurrency: PositiveInt = 8
    """Jobs that one process runs at the same time."""
    judge_concurrency: PositiveInt = 6
    """Judging jobs that all processes together run at the same time. Below `concurrency`, so that slow judges leave
    places to other jobs."""
    lease_seconds: float = Field(default=30.0, ge=1, le=3600)
    """How long a job of a worker that died waits until another one takes it. Live workers extend their leases."""
    keep_days: PositiveFloat = 7.0
    """How long done and cancelled jobs stay listed. Until then their keys are taken."""
    keep_dead_days: PositiveFloat = 90.0

    @model_validator(mode="after")
    def _password_has_a_broker(self) -> JobSettings:
        """Refuse a password that would have no effect, or that would replace the broker's own."""
        if self.broker_password is not None and (self.broker is None or has_password(self.broker)):
            raise ValueError(
                "broker_password: it belongs to a broker without a password; write broker = redis://host:6379/0"
            )
        return self

    @property
    def full_broker(self) -> str | None:
        """The broker's URL with the password, never to be shown."""
        if self.broker is None or self.broker_password is None:
            return self.broker
        return with_password(self.broker, self.broker_password)
