"""Determine the address that clients should use for this proxy.

Anybody on the way can set the Host header, and an address made from it could send an agent, with its key, to another
machine. So the header only counts if it names this machine, and `server.public_url` has priority.
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
    """Return the base address, without a path of the proxy and without a trailing slash.

    It is `server.public_url`; else the Host header if that names this machine (loopback, the address on which the
    request arrived, `server.host`, the host name); else the address on which the request arrived. X-Forwarded-Host is
    never used.
    """
    settings = service(request, Settings).server
    if settings.public_url:
        return settings.public_url.rstrip("/")
    local = _local_address(request, settings)
    scheme = request.url.scheme
    found = _HOST.fullmatch(request.headers.get("host", ""))
    if found is not None and (found[2] is None or 0 < int(found[2]) <= _MOST_PORT):
        ours = {local[0], settings.host.lower(), socket.gethostname().lower()}
        if _is_loopback(found[1]) or _bare(found[1]) in ours:
            return f"{scheme}://{found[0]}"
    host, port = local
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}" if port is None else f"{scheme}://{host}:{port}"


def is_https(request: Request) -> bool:
    """Return whether browsers use HTTPS, either to this proxy or to the gateway that `server.public_url` names."""
    settings = service(request, Settings).server
    return request.url.scheme == "https" or (settings.public_url or "").lower().startswith("https:")


def _local_address(request: Request, settings: ServerSettings) -> tuple[str, int | None]:
    """Return host and port of the connection's local end, or those of the configuration for a Unix socket.

    The port is None if it is the scheme's default.
    """
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
