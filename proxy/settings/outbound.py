"""Requests that base-rl sends to addresses which users name, such as webhooks."""

from __future__ import annotations

from pydantic import Field

from proxy.settings.destinations import Destination
from proxy.settings.section import Section


class OutboundSettings(Section):
    """Bounds on requests to URLs that users name."""

    allow: tuple[Destination, ...] = ()
    """Networks, addresses and host names that may be reached although they are private, and by `http://`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """Longest time for one request and its answer."""
