"""Places in a network that a setting allows."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

# A name has a letter, and its last part too: `10.0.0.300` is a mistake and no name.
_HOST_NAME = re.compile(r"(?!.*(^|\.)\d+$)[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.IGNORECASE)


def _destination(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        if not _HOST_NAME.fullmatch(text):
            raise ValueError(
                f"{text!r} is neither a network nor a host name: write 10.0.0.0/8, 10.1.2.3 or hooks.internal"
            ) from error
        return text.lower()


Destination = Annotated[str, AfterValidator(_destination)]
"""A network or an address in its usual form, or a host name in lower case."""
