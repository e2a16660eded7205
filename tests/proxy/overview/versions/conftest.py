from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.proxy.turns.world import World, open_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with open_world(database_url) as opened:
        yield opened
