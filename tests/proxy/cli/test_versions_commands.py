"""`base-rl versions …` against a real proxy with a real trainer. The proxy's log lines precede the output."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.database.tables import PolicyVersionRow
from tests.trainer.real_proxy import ADMIN, RUN, TRAINER, RealProxy, real_proxy, write_real_model


@pytest.fixture
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealProxy]:
    directory = tmp_path_factory.mktemp("versions")
    with real_proxy(directory, write_real_model(directory / "base")) as started:
        yield started


def asked(proxy: RealProxy, *arguments: str, status: int = 0) -> str:
    place = ("--url", proxy.url, "--api-key", ADMIN)
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["versions", *arguments, *place])
    assert result.exit_code == status, result.output
    return result.output


def test_the_trainer_continues_from_the_version_that_was_gone_back_to(proxy: RealProxy) -> None:
    with proxy.trainer("a-process") as trainer:
        for version in range(2):
            proxy.group([1.0, 0.0, 0.5, 0.0], version=version)
            trainer.loop.step()
        told = asked(proxy, "rollback", RUN, "--to", "1", "--reason", "answers got\nshorter")
        assert told.splitlines()[-2:] == [
            "rolled back: 2",
            "engines serve version 1 (the newest good version); training continues from version 1",
        ]
        proxy.group([1.0, 0.0, 0.5, 0.0], version=1)
        trainer.loop.step()  # notices the new head
        trainer.loop.step()
    listed = asked(proxy, "list", RUN)
    rows = [line.split() for line in listed.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["3", "1"], ["2", "1"], ["1", "0"], ["0", "–"]]
    assert rows[0][3] == "head"
    assert rows[1][2] == "rolled_back"
    assert "shorter" in " ".join(rows[1])
    for version in (2, 3):
        proxy.change(PolicyVersionRow, PolicyVersionRow.version == version, is_saved=False)
    listed = asked(proxy, "list", RUN)
    assert [("in memory" in line, "lost" in line) for line in listed.splitlines()[1:]] == [
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]
    with httpx.Client(base_url=proxy.url, headers={"origin": proxy.url}) as browser:
        browser.post("/admin/login", data={"key": ADMIN})
        page = browser.get(f"/admin/runs/{RUN}/versions").text
    assert page.count(">in memory</span>") == 1
    assert "2 older ones are not shown: --limit 4" in asked(proxy, "list", RUN, "--limit", "2")
    assert json.loads(asked(proxy, "list", RUN, "--json"))["head"] == 3
    diff = asked(proxy, "diff", RUN, "0", "3")
    assert "v0 to v3: 2 steps trained" in diff
    assert "sessions that moved it most" in diff
    assert "mean reward" not in diff, "nothing was answered by version 3"
    assert "mean reward" in asked(proxy, "diff", RUN, "0", "1")
    assert "was not made from version 2" in asked(proxy, "diff", RUN, "2", "3", status=1)
    notice = "version 2 was rolled back: answers got shorter"
    assert notice in " ".join(asked(proxy, "pin", RUN, "2", "--reason", "why not", status=1).split())


def test_a_version_is_pinned_unpinned_and_rejected(proxy: RealProxy) -> None:
    with proxy.trainer("a-process") as trainer:
        proxy.group([1.0, 0.0, 0.5, 0.0])
        trainer.loop.step()
    pinned = asked(proxy, "pin", RUN, "0", "--reason", "for the demonstration")
    assert pinned.endswith("engines serve version 0 (pinned); training continues from version 1\n")
    assert "pinned" in asked(proxy, "list", RUN).splitlines()[2]
    told = asked(proxy, "unpin", RUN, "--reason", "it is over", "--json")
    standing = json.loads(told[told.index("{") :])
    assert (standing["head"], standing["pinned"]) == (1, None)
    assert "training continues from version 0" in asked(proxy, "reject", RUN, "1", "--reason", "it swears")
    assert "it swears" in asked(proxy, "list", RUN)
    assert "has no version 7" in asked(proxy, "reject", RUN, "7", "--reason", "x", status=1)


def test_the_secret_that_signs_the_requests_to_an_evaluator_is_printed(proxy: RealProxy) -> None:
    proxy.add_run("second")
    secret = asked(proxy, "evaluation-secret", RUN).splitlines()[-1]
    assert secret == proxy.app.services.evaluator.secret(proxy.world.run), "it signs the requests"
    assert secret.startswith("whsec_")
    told = asked(proxy, "evaluation-secret", RUN, "--json")
    assert json.loads(told[told.index("{") :]) == {"secret": secret}
    assert asked(proxy, "evaluation-secret", "second").splitlines()[-1] != secret, "each run has its own"
    assert "no run" in asked(proxy, "evaluation-secret", "third", status=1)


def test_the_secret_is_for_those_who_may_change_the_run(proxy: RealProxy) -> None:
    place = ("--url", proxy.url, "--api-key", TRAINER)
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["versions", "evaluation-secret", RUN, *place])
    assert result.exit_code == 1
    assert "whsec_" not in result.output
