"""The load of an engine under test."""

from __future__ import annotations

from proxy.engines.activity import EngineActivity, EngineSlots
from proxy.engines.place import EngineLoad


def new_load(slots: int = 64) -> EngineLoad:
    return EngineLoad(EngineSlots(slots, EngineActivity()))
