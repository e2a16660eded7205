"""Where a candidate answers prompts unseen: adapters beside the serving version, whole weights on an engine apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.database.tables import AnswerPairRow
from proxy.settings import ConfigurationError
from tests.proxy.gates.test_canary import make_engines, open_proxy
from tests.proxy.test_loop import until

SHADOW = {"policy": "gated", "shadow": {"share": 1.0, "answers": 5}}


@pytest.mark.parametrize(("kind", "engines"), [("adapter", 1), ("full", 2)])
async def test_a_candidate_answers_unseen_until_it_serves(tmp_path: Path, kind: str, engines: int) -> None:
    async with open_proxy(tmp_path, make_engines(tmp_path, engines), SHADOW, kind) as proxy:
        await proxy.commit(0)

        async def serves() -> bool:
            by, state = await proxy.session(), (await proxy.states())[1]
            assert by == "policy@0" or state in ("committed", "serving"), "no caller hears a candidate"
            return state == "serving"

        await until(serves)
        found = (await proxy.api("/versions/1/gates"))["findings"]
        assert [(each["gate"], each["state"]) for each in found] == [("shadow", "passed")]
        assert found[0]["evidence"]["pairs"] == 5
        assert "waits for" not in found[0]["text"]
        assert "on 5 prompts, nothing that is guarded is higher" in await proxy.page()
        table = AnswerPairRow.__table__
        pairs = await proxy.app.services.database.read(
            lambda connection: list(connection.execute(table.select()).all())
        )
        assert {(pair.version, pair.against) for pair in pairs} == {(1, 0)}
        metrics = (await proxy.client.get("/metrics")).text
        assert 'base_rl_candidate_answers_total{outcome="recorded"} 5.0' in metrics


async def test_a_shadow_of_whole_weights_needs_a_second_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run.release.shadow.share: .*set engine.replicas to 2"):
        async with open_proxy(tmp_path, make_engines(tmp_path, 1), SHADOW):
            pass
