"""How proxies that share engines recognise each other, and notice at once that one on this machine has ended."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

_LONGEST_HOST = 64


def this_machine() -> str:
    """Return the name of this host."""
    return socket.gethostname()[:_LONGEST_HOST]


def machine_of(url: str) -> str:
    """Return the one machine that reaches the address: this one for a loopback address; empty for any other."""
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost" or host.endswith(".localhost")
    return this_machine() if is_loopback else ""


class ProxyIdentity:
    """The name of one running proxy: host, process and a random part, since one process may have several proxies."""

    def __init__(self) -> None:
        self._place = f"{this_machine()}/{_process_namespace()}"
        self.name = f"{self._place}/{os.getpid()}/{secrets.token_hex(4)}"

    def is_gone(self, name: str) -> bool:
        """Return whether the proxy with this name is known to have ended. False if it runs on another machine, where
        only its lease and the age of its reports tell."""
        place, _, rest = name.rpartition("/")[0].rpartition("/")
        if place != self._place or not rest.isdecimal():
            return False
        try:
            os.kill(int(rest), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def _process_namespace() -> str:
    """Return the namespace of this process's number: two containers on one host name may use the same numbers."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "pid"
