from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy.app import create_app
from proxy.settings import (
    BootstrapSettings,
    JudgeKind,
    JudgeSettings,
    JudgingSettings,
    OutboundSettings,
    RunSettings,
    ServerSettings,
    Settings,
)
from tests.fakes.engine import FakeEngine
from tests.proxy.admin.pages.browsing import ADMIN, Browser
from tests.proxy.outbound.targets import LOOPBACK
from tests.proxy.overview.site import ORIGIN
from tests.proxy.tokens.models import write_model
from tests.running_app import running

JUDGES = "tests.proxy.judges.judges_in_python"
HALF = JudgeSettings(kind=JudgeKind.PYTHON, function=f"{JUDGES}:half")


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    """Signed in with an admin key, to an installation with the runs `mine` of `shop` and `theirs` of `elsewhere`."""
    model = str(write_model(tmp_path / "model"))
    app = create_app(
        Settings(
            server=ServerSettings(data_dir=tmp_path / "data", public_url=ORIGIN),
            bootstrap=BootstrapSettings(admin_key=SecretStr(ADMIN)),
            run=RunSettings(name="mine", model=model, project="shop", judges={"taste": HALF}),
            runs={"theirs": RunSettings(name="theirs", model=model, project="elsewhere")},
            judging=JudgingSettings(python_modules=(JUDGES,), python_in_proxy=True),
            outbound=OutboundSettings(allow=(LOOPBACK,)),
        ),
        engine=FakeEngine(lambda _request: [5, 2], model_path=model, label="default"),
    )
    async with running(app) as client:
        found = Browser(client)
        await found.enter(ADMIN)
        yield found
