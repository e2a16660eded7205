"""The page of engines."""

from __future__ import annotations

import re

import msgspec

from proxy.auth.service import PrincipalKind
from proxy.overview.views import EngineView
from tests.fakes.run_history import NOW
from tests.proxy.admin.visiting import enter
from tests.proxy.overview.site import Site

HOSTILE = "<img src=x onerror=alert(1)>"


async def test_engines_are_shown_with_what_they_hold_and_their_problems(site: Site, run_id: str) -> None:
    await enter(site)
    assert "No engines" in (await site.client.get("/admin/engines")).text
    engine = EngineView(
        name="gpu-2", url="http://10.0.0.2:30000", base_model=HOSTILE, state="not_ready", problem=HOSTILE,
        versions={"calculator": 5, HOSTILE: None}, outstanding_tokens=1234, adapters=("calculator-v5",), calls=3,
        capacity=8, seen_at=NOW - 7,
    )  # fmt: skip
    site.serving.engines = (engine,)
    page = (await site.client.get("/admin/engines")).text
    assert HOSTILE not in page
    for text in ("gpu-2", "not ready", "calculator v5", "1.23k", "calculator-v5", "of 8"):
        assert text in page, text
    seen = re.findall(r'"x-seen": "(\w+)"', page)[0]
    site.serving.engines = (msgspec.structs.replace(engine, seen_at=NOW),)
    assert (await site.client.get("/admin/engines", headers={"x-seen": seen})).status_code == 204
    site.serving.engines = (msgspec.structs.replace(engine, state="ready", problem=None),)
    assert (await site.client.get("/admin/engines", headers={"x-seen": seen})).status_code == 200


async def test_only_admins_see_engines(site: Site, run_id: str) -> None:
    await enter(site, PrincipalKind.RUN, run_id)
    assert (await site.client.get("/admin/engines")).status_code == 403
    assert "/admin/engines" not in (await site.client.get("/admin")).text
