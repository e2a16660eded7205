"""The address that clients are told to use.

A Host header is whatever a client, or somebody between, says: an address made of it would send an agent, with its
key, wherever that is. So it counts only where it names this machine; `server.public_url` comes before all else.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from fastapi import Request

from proxy.http.services import service
from proxy.settings import ServerSettings, Settings

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_MOST_PORT = 65535


def client_address(request: Request) -> str:
    """Return the address without a path of ours and without a slash at its end.

    `server.public_url`; else the Host header if it names this machine (loopback, the address that the request came
    in at, `server.host`, the machine's name); else the address that the request came in at. X-Forwarded-Host is
    never read.
    """
    settings = service(request, Settings).server
    if settings.public_url:
        return settings.public_url.rstrip("/")
    reached = _reached_at(request, settings)
    scheme = request.url.scheme
    found = _HOST.fullmatch(request.headers.get("host", ""))
    if found is not None and (found[2] is None or 0 < int(found[2]) <= _MOST_PORT):
        ours = {reached[0], settings.host.lower(), socket.gethostname().lower()}
        if _is_loopback(found[1]) or _bare(found[1]) in ours:
            return f"{scheme}://{found[0]}"
    host, port = reached
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}" if port is None else f"{scheme}://{host}:{port}"


def is_https(request: Request) -> bool:
    """Whether browsers come by HTTPS: to us, or to the gateway that `server.public_url` names."""
    settings = service(request, Settings).server
    return request.url.scheme == "https" or (settings.public_url or "").lower().startswith("https:")


def _reached_at(request: Request, settings: ServerSettings) -> tuple[str, int | None]:
    """The local end of the connection; where there is none with a port of its own (a Unix socket), what the
    configuration says."""
    server = request.scope.get("server")
    if server is None or "/" in server[0]:
        return settings.host, settings.port
    host, port = server
    if port == {"http": 80, "https": 443}.get(request.url.scheme):
        port = None
    return str(host).lower(), port


def _is_loopback(host: str) -> bool:
    name = _bare(host)
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _bare(host: str) -> str:
    return host.strip("[]").lower()
