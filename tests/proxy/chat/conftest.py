from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.tokens.template import ChatTemplate
from tests.proxy.chat.world import World, open_world
from tests.proxy.tokens.models import write_model


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
async def world(tmp_path: Path, template: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tmp_path, template) as opened:
        yield opened
