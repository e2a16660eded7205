"""Addresses of this machine."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def address_towards(url: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Return the address of this machine on the network that leads to a URL's host. Nothing is sent.

    `family` restricts it to IPv4 or IPv6. Raises OSError if the host's name does not resolve, or no network leads
    there.
    """
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)
    found, kind, protocol, _, place = socket.getaddrinfo(parts.hostname, port, family, socket.SOCK_DGRAM)[0]
    # The system chooses an address when a datagram socket is connected.
    with socket.socket(found, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
