"""A watch over the process's open files, which clients, engine streams and database connections all take."""

from __future__ import annotations

from proxy import machine
from proxy.log import logger

_LOG = logger(__name__)

_NEARLY = 0.9
"""Share of the limit above which the operator is warned. At the limit itself the event loop drops new connections
without a word, and SQLite cannot open its files."""

LOOK_SECONDS = 5.0


class DescriptorWatch:
    """Log a warning when open files come near the limit, and a line when they have left it."""

    def __init__(self) -> None:
        self._is_near = False

    async def look(self) -> None:
        used, limit = machine.open_descriptors(), machine.descriptor_limit()
        if used is None:
            return
        is_near = used >= _NEARLY * limit
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
