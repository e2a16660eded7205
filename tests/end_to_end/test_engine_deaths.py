"""A version that kills engines, under `base-rl up`'s supervisor: it is rejected, and the previous version serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proxy.contract.claim import CommitRequest, encode
from proxy.contract.identifiers import SessionId
from tests.end_to_end.installation import EXAMPLE, Installation, installation
from tests.proxy.versions.publishing import fit_request, reference

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

RUN = "calculator"
QUESTION = {"role": "user", "content": "What is 12 * 7?"}


async def test_a_version_that_kills_an_engine_twice_is_not_loaded_again(tmp_path: Path) -> None:
    """The version passes every check, and the engine is killed soon after each time it loads the version."""
    async with installation(tmp_path, with_trainer=False) as found:
        versions = tmp_path / "weights" / str(found.ask_store("SELECT id FROM runs")[0][0])
        for number in (1, 2):
            directory = Path(shutil.copytree(EXAMPLE / "checkpoint", versions / f"v{number:06d}"))
            await commit(found, fit_request([SessionId("ses_1")], number - 1, reference(directory)))
            await found.until(lambda wanted=number: found.serving() == wanted, what=f"v{number} served")  # type: ignore[misc]
        for death in (1, 2):
            found.kill("engine")
            await found.until(
                lambda counted=death: (
                    found.ask_store(  # type: ignore[misc]
                        "SELECT engine_deaths FROM policy_versions WHERE version = 2"
                    )[0][0]
                    == counted
                ),
                what=f"death {death} counted",
            )
            if death == 1:
                await found.until_ready()
                assert found.serving() == 2
        await found.until_ready()
        assert (found.head(), found.serving()) == (1, 1)
        async with found.client() as client:
            headers = {"authorization": f"Bearer {found.stack.keys.admin_key}"}
            health = (await client.get("/api/v1/health", headers=headers)).json()
            answer = await client.post(
                "/v1/chat/completions", json={"model": RUN, "messages": [QUESTION], "max_tokens": 4}
            )
        assert health["status"] == "degraded"
        assert any("the engine stopped 2 times" in problem for problem in health["problems"])
        assert answer.json()["system_fingerprint"].endswith("@1")


async def commit(found: Installation, request: CommitRequest) -> None:
    async with found.client() as client:
        answer = await client.post(
            f"/api/v1/runs/{RUN}/versions",
            content=encode(request),
            headers={"authorization": f"Bearer {found.stack.keys.trainer_key}"},
        )
    assert answer.status_code == 200, answer.text
