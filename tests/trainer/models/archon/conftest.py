from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.archon.shapes import save_random


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the directory of a model."""

    @cache
    def saved(name: str, **changes: Any) -> Path:
        directory = tmp_path_factory.mktemp(name)
        save_random(directory, name, **changes)
        return directory

    return saved
