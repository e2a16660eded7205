"""Ports on this machine."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PORTS_TO_TRY = 100
# Below the range from which the kernel takes ports for outgoing connections (from 32768 on Linux).
_PRIVATE_PORTS = range(20000, 32000)


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


@contextmanager
def claimed_port(host: str, first: int, *, or_next: bool = False) -> Iterator[int]:
    """Yield a port on which no program listens and which, on Linux, no other base-rl claims during the block.

    The port is `first`, or with `or_next` the next free one after it; 0 stands for any. Claims are needed because
    seconds pass between the choice of a port and the moment that a process listens on it, in which a second
    installation would choose the same. Raises NoFreePort.
    """
    if first == 0:
        yield random_free_port(host)
        return
    for port in range(first, min(first + (_PORTS_TO_TRY if or_next else 1), 65536)):
        claim = _claim(port)
        if claim is None:
            continue
        with claim:
            if is_free(host, port):
                yield port
                return
    if or_next:
        raise NoFreePort(f"no free port from {first} on at {host}; name another with --port")
    raise NoFreePort(
        f"port {first} at {host} cannot be listened on: another program has it, or the address is not one of this "
        "machine; name another port with --port"
    )


def _claim(port: int) -> socket.socket | None:
    """Mark a port as taken among the installations of this machine, until the socket is closed or the process ends.

    The mark is a name in the kernel's abstract namespace, so nothing remains afterwards; on other systems there is no
    mark.
    """
    mark = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            mark.bind(f"\0base-rl-port-{port}")
        except OSError:
            mark.close()
            return None
    return mark


def random_free_port(host: str) -> int:
    """Return a port on which no program listens. Raises NoFreePort.

    It is drawn at random: two installations that start at the same moment, whose engines take seconds to listen,
    would otherwise both take the first free one.
    """
    for _ in range(_PORTS_TO_TRY):
        port = secrets.choice(_PRIVATE_PORTS)
        if is_free(host, port):
            return port
    raise NoFreePort(f"no free port on {host} between {_PRIVATE_PORTS.start} and {_PRIVATE_PORTS.stop}")
