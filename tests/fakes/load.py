"""The load of an engine under test."""

from __future__ import annotations

from proxy.engines.activity import EngineActivity
from proxy.engines.place import EngineLoad
from proxy.engines.slots import EngineSlots


def new_load(slots: int = 64) -> EngineLoad:
    return EngineLoad(EngineSlots(slots, EngineActivity()))
