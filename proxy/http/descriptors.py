"""Warn before the process runs out of file descriptors.

Clients, engine streams and database connections each use one. At the limit the event loop drops new connections
without a log line, and SQLite cannot open its files.
"""

from __future__ import annotations

from proxy import machine
from proxy.log import logger

_LOG = logger(__name__)

_WARN_SHARE = 0.9  # of the limit: early enough to act, late enough not to be a false alarm

CHECK_SECONDS = 5.0


class DescriptorWatch:
    """Monitor that logs a warning when open descriptors come near the limit, and a line when they are free again."""

    def __init__(self) -> None:
        self._is_near = False

    async def check(self) -> None:
        """Compare the open descriptors with the limit. To be called every `CHECK_SECONDS`."""
        used, limit = machine.open_descriptors(), machine.descriptor_limit()
        if used is None:
            return
        is_near = used >= _WARN_SHARE * limit
        if is_near and not self._is_near:
            _LOG.warning(
                "nearly out of file descriptors: new connections will be dropped; raise the limit (`ulimit -n`, "
                "systemd's LimitNOFILE) or lower server.max_connections",
                open=used,
                limit=limit,
            )
        elif self._is_near and not is_near:
            _LOG.info("file descriptors are free again", open=used, limit=limit)
        self._is_near = is_near
