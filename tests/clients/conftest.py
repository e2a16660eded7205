from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.following import Follower
from tests.clients.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("base-rl")) as running:
        yield running


@pytest.fixture
def follow(stack: Stack) -> Follower:
    return Follower(stack)
