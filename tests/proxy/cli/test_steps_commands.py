"""Output of the command line about steps and claims, from a real proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from proxy.cli.commands import app
from tests.trainer.real_proxy import ADMIN, RUN, RealProxy, real_proxy, write_real_model


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealProxy]:
    """A run with one step, one of whose rewards was revised since, and a leased claim."""
    directory = tmp_path_factory.mktemp("steps")
    with real_proxy(directory, write_real_model(directory / "base")) as started:
        with started.trainer("a-process") as trainer:
            first = started.group([1.0, 0.0, 0.5, 0.0])
            for _ in range(4):
                started.session(1.0, turn_reward=0.25)
            trainer.loop.step()
            started.do(started.world.reward(first[0], -2.0, after_training=True))
            for _ in range(8):
                started.session(0.5, version=1)
            assert trainer.claims.take(1) is not None
        yield started


def asked(proxy: RealProxy, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, [*arguments, "--url", proxy.url, "--api-key", ADMIN], env={"COLUMNS": "250"}, catch_exceptions=False
    )


def test_steps_are_listed(proxy: RealProxy) -> None:
    listed = asked(proxy, "steps", "list", RUN)
    assert listed.exit_code == 0
    assert "v1" in listed.output
    assert "the base model's" in listed.output
    as_json = json.loads(asked(proxy, "steps", "list", RUN, "--json").output)
    assert [step["version"] for step in as_json] == [1, 0]


def test_a_step_is_explained_by_group_with_its_rewards_then_and_now(proxy: RealProxy) -> None:
    shown = asked(proxy, "steps", "show", RUN, "1").output
    view = json.loads(asked(proxy, "steps", "show", RUN, "1", "--json").output)
    for named in ("gradient norm", "clipped share", "times", "torch", "sessions of no group"):
        assert named in shown
    assert view["trajectories"][0]["group"] in shown
    assert "reward 1 → −2" in shown
    assert "1 of its trajectories have other rewards now" in shown
    assert "reward of a turn 0.25" in shown
    for entry in view["trajectories"]:
        assert entry["audit"]["session_id"] in shown
    assert sum(entry["sampled"] for entry in view["trajectories"]) == 4
    told = proxy.get("/steps/1/tokens")["turns"]
    tokens = {turn["turn_id"]: turn for turn in told}
    assert len({turn["session_id"] for turn in tokens.values()}) == 4
    assert all(len(turn["texts"]) == len(turn["ratios"]) == len(turn["output_ids"]) for turn in told)


def test_the_base_model_is_shown_without_a_step(proxy: RealProxy) -> None:
    shown = asked(proxy, "steps", "show", RUN, "0")
    assert shown.exit_code == 0
    assert "the base model" in shown.output


def test_a_claim_is_listed_and_taken_back(proxy: RealProxy) -> None:
    listed = json.loads(asked(proxy, "claims", "list", RUN, "--json").output)
    assert [(claim["state"], claim["sessions"]) for claim in listed] == [("leased", 8), ("committed", 8)]
    assert "a-process" in asked(proxy, "claims", "list", RUN).output
    released = asked(proxy, "claims", "release", RUN, listed[0]["id"])
    assert released.exit_code == 0
    assert "is released" in released.output
    again = json.loads(asked(proxy, "claims", "list", RUN, "--json").output)
    assert [claim["state"] for claim in again] == ["released", "committed"]


def test_missing_objects_are_reported(proxy: RealProxy) -> None:
    for arguments in (
        ("steps", "show", RUN, "9"),
        ("steps", "list", "other"),
        ("claims", "release", RUN, "clm_none"),
    ):
        assert asked(proxy, *arguments).exit_code == 1
