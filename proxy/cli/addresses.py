"""Ports on this machine."""

from __future__ import annotations

import socket

_PORTS_TO_TRY = 100


class NoFreePort(Exception):
    """None of the ports that were tried is free."""


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def next_free_port(host: str, first: int) -> int:
    """`first`, or the next port after it that nobody listens on. Raises NoFreePort."""
    for port in range(first, min(first + _PORTS_TO_TRY, 65536)):
        if is_free(host, port):
            return port
    raise NoFreePort(f"no free port from {first} to {first + _PORTS_TO_TRY - 1} on {host}; name another with --port")
