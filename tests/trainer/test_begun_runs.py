"""A run that begins from another run's version: its trainer continues those weights with a fresh optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.real_proxy import ADMIN, real_proxy, write_real_model
from tests.trainer.test_loop import same
from trainer.errors import WeightsUnusable

# Both published forms, and the two definitions of the model.
FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "archon": {"backend": "archon"},
    "adapter": {"adapter": {"rank": 2, "publish": "adapter"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_step_continues_from_the_version_of_the_other_run(tmp_path: Path, form: str) -> None:
    """The other run's directory keeps everything: only its own trainer removes from it."""
    settings = FORMS[form]
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        proxy.group([0.0, 1.0])
        with proxy.trainer(**settings) as first:
            first.loop.step()
            trained = first.weights()
            assert first.learner.steps > 0
        proxy.add_run("next", begin_from="policy@1")
        proxy.group([0.0, 1.0], run="next")
        with proxy.trainer(run="next", api_key=ADMIN, **settings) as second:
            assert same(second.weights(), trained)
            assert second.learner.steps == 0
            second.loop.step()
            assert not same(second.weights(), trained)
        versions = proxy.get("/versions", run="next")["versions"]
        (source,) = [each for each in proxy.get("/versions")["versions"] if each["version"] == 1]
        assert [(each["version"], each["parent"], each["begun_from"]) for each in versions] == [
            (1, 0, None),
            (0, None, "policy@1"),
        ]
        assert versions[1]["weights"] == source["weights"]
        assert proxy.get("", run="next")["begun_from"] == "policy@1"
        with proxy.trainer(run="next", api_key=ADMIN, **settings) as restarted:
            assert same(restarted.weights(), second.weights())
            assert restarted.learner.steps == second.learner.steps > 0
        assert (Path(source["weights"]["uri"]) / "trainer_state").is_dir()


def test_weights_that_were_changed_meanwhile_are_refused(tmp_path: Path) -> None:
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        proxy.group([0.0, 1.0])
        with proxy.trainer() as first:
            first.loop.step()
        proxy.add_run("next", begin_from="policy@1")
        (directory,) = {each["weights"]["uri"] for each in proxy.get("/versions")["versions"] if each["version"]}
        (Path(directory) / "config.json").write_text("{}")
        with pytest.raises(WeightsUnusable, match=r"config\.json"), proxy.trainer(run="next", api_key=ADMIN):
            pass
