from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.database.unit_of_work import Database
from tests.proxy.webhooks.world import Webhooks, open_webhooks


@pytest.fixture
async def webhooks(database_url: str) -> AsyncIterator[Webhooks]:
    database = Database(database_url)
    try:
        async with open_webhooks(database) as opened:
            yield opened
    finally:
        await database.aclose()
