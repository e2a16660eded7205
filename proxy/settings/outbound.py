"""Requests that base-rl sends to addresses which users name, such as webhooks."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from proxy.settings.section import Section

_HOST_NAME = re.compile(r"(?!.*\d$)[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|localhost", re.IGNORECASE)


def _destination(text: str) -> str:
    """Return an allowed destination: a network or an address in its usual form, a host name in lower case."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        # The name of a host never ends in a digit: `10.0.0.300` is a mistake and no name.
        if not _HOST_NAME.fullmatch(text):
            raise ValueError(
                f"{text!r} is neither a network nor a host name: write 10.0.0.0/8, 10.1.2.3 or hooks.internal"
            ) from error
        return text.lower()


class OutboundSettings(Section):
    """Bounds on requests to URLs that users name."""

    allow: tuple[Annotated[str, AfterValidator(_destination)], ...] = ()
    """Networks, addresses and host names that may be reached although they are private, and by `http://`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """Longest time for one request and its answer."""
