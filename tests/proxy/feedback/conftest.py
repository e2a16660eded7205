from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.feedback.ledger import Ledger
from tests.proxy.turns.world import World, open_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with open_world(database_url) as opened:
        yield opened


@pytest.fixture
def ledger(world: World, tmp_path: Path) -> Ledger:
    return Ledger(world, tmp_path)
