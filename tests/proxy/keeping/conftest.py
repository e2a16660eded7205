from __future__ import annotations

from tests.proxy.trajectories.conftest import world

__all__ = ["world"]
