"""Limits of the machine and the container that this process runs in: memory and file descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_OWN_DESCRIPTORS = Path("/proc/self/fd")
_MOST_BODY_BYTES = 2048 << 20


def memory_limit(root: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUPS) -> int:
    """Return the bytes of memory that this process may use.

    That is the smallest of the machine's memory, the limits of the control groups (v2 and v1) that the process is in,
    and its address-space limit. `root` and `own` are where Linux mounts control groups and lists those of a process;
    where they are absent, only the other two count.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bounds = [physical, *_cgroup_limits(root, own)]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        bounds.append(address_space)
    return min(bounds)


def default_body_bytes() -> int:
    """Return the default bound on the bytes of all bodies in work: an eighth of the memory, at most 2 GiB."""
    return min(_MOST_BODY_BYTES, memory_limit() // 8)


def shared_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to the address, which does not listen and does not keep other processes of this user
    from binding it in the same way. Raise OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _cgroup_limits(root: Path, own: Path) -> list[int]:
    """Yield the limits of the process's control groups and of their parents, which apply to it as well."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2 has one hierarchy, which names no controllers
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(base):
                break
            limits += _number_in(directory / file)
    return limits


def _number_in(file: Path) -> list[int]:
    """Yield the number in a file; nothing for `max`, which means no limit, or for an absent file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open file descriptors to the hard one, and return it.

    Shells set the soft limit to 1,024 for the sake of programs that use select(); this process does not, and every
    client, engine stream and database connection takes a descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def descriptor_limit() -> int:
    """Return how many file descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_descriptors() -> int | None:
    """Return how many file descriptors this process has open; None where the system does not report it."""
    try:
        return sum(1 for _ in _OWN_DESCRIPTORS.iterdir())
    except OSError as error:
        # Listing takes a descriptor too: this error means that all of them are in use.
        return descriptor_limit() if error.errno in (errno.EMFILE, errno.ENFILE) else None
