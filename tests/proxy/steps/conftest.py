from __future__ import annotations

from tests.proxy.turns.conftest import world

__all__ = ["world"]
