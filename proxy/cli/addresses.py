"""Ports on this machine."""

from __future__ import annotations

import secrets
import socket

_PORTS_TO_TRY = 100
_PRIVATE_PORTS = range(20000, 32000)
"""Below those that the kernel gives to outgoing connections (from 32768 on Linux)."""


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


def random_free_port(host: str) -> int:
    """A port that nobody listens on, drawn at random: two installations that start at the same moment, whose engines
    take a while to listen, would otherwise both take the first free one. Raises NoFreePort."""
    for _ in range(_PORTS_TO_TRY):
        port = secrets.choice(_PRIVATE_PORTS)
        if is_free(host, port):
            return port
    raise NoFreePort(f"no free port on {host} between {_PRIVATE_PORTS.start} and {_PRIVATE_PORTS.stop}")
