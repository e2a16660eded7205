"""Engines as a resource: list them, and add, drain, resume and remove them while the proxies run."""

from __future__ import annotations

from proxy.overview.views import EngineView
from proxy.serving.pool import EnginePool


class EngineDirectory:
    """The engines that the proxies of this store share."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def list_(self) -> tuple[EngineView, ...]:
        """Return all engines, oldest first, as of the last health interval."""
        return self._pool.views()
