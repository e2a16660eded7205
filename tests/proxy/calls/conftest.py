from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.tokens.template import ChatTemplate
from tests.database import sqlite_database
from tests.proxy.calls.world import World, open_world
from tests.proxy.tokens.models import write_model


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def chat_url(tmp_path: Path) -> str:
    """The store of `world`. Modules whose calls depend more on the store provide it as `database_url`, and so run on
    both databases."""
    return sqlite_database(tmp_path)


@pytest.fixture
async def world(chat_url: str, tmp_path: Path, template: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tmp_path, template, url=chat_url) as opened:
        yield opened
