from __future__ import annotations

from pathlib import Path

import pytest

from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import THINKING, write_model

CHECKPOINT = Path(__file__).parents[3] / "agents_examples" / "calculator" / "checkpoint"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def template(model_dir: Path) -> ChatTemplate:
    return ChatTemplate.load(str(model_dir))


@pytest.fixture(scope="session")
def thinking_template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("thinking"), template=THINKING)))


@pytest.fixture(scope="session")
def templates(template: ChatTemplate) -> dict[str, ChatTemplate]:
    """Templates by name: the tests' own model, and the shipped checkpoint."""
    return {"small": template, "shipped": ChatTemplate.load(str(CHECKPOINT))}
