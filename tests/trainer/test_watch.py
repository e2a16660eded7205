"""Batches that teach nothing they should, one after the other, at the real proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.real_proxy import RealProxy, real_proxy, write_real_model


def poison(proxy: RealProxy, times: int) -> None:
    for _ in range(times):
        proxy.group([1e38, -1e38])


def test_the_run_is_paused_with_the_reason_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    unscaled: dict[str, Any] = {"algorithm": {"scale": "none"}, "batch": {"trajectories": 2, "at_least": 2}}
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(**unscaled) as trainer:
            poison(proxy, 2)
            trainer.loop.step()
            trainer.loop.step()
            proxy.group([1.0, 0.0])
            trainer.loop.step()
            assert trainer.loop.head.version == 1, "two are skipped and consumed with the next"
            poison(proxy, 3)
            for _ in range(3):
                assert proxy.get("")["state"] == "active"
                trainer.loop.step()
            assert proxy.get("")["state"] == "paused"
            (problem,) = [each for each in proxy.problems() if "paused" in each]
            assert "3 batches in a row had no gradient to learn from at version 1 (norm of the last: inf)" in problem
            proxy.group([1.0, 0.0], version=1)
            trainer.loop.step()
            assert trainer.loop.head.version == 1, "nothing is handed out"
            proxy.post("/resume")
            trainer.loop.step()
            assert trainer.loop.head.version == 2
            assert proxy.get("/steps/2")["step"]["metrics"]["skipped_non_finite_gradient"] == 6
            assert not [each for each in proxy.problems() if "paused" in each]

        proxy.post("/pause")
        with proxy.trainer("another", **unscaled) as trainer:
            proxy.group([1.0, 0.0], version=2)
            trainer.loop.step()
            assert trainer.loop.head.version == 2, "who starts while it is paused waits as well"
            proxy.post("/resume")
            trainer.loop.step()
            assert trainer.loop.head.version == 3


@pytest.mark.parametrize(("bound", "version"), [(1e-9, 0), (1e9, 1)])
def test_a_gradient_beyond_its_bound_is_not_learnt_from(tmp_path: Path, bound: float, version: int) -> None:
    with (
        real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy,
        proxy.trainer(optimizer={"skip_norm": bound, "pause_after": 1}, batch={"trajectories": 2}) as trainer,
    ):
        before = trainer.weights()
        proxy.group([1.0, 0.0])
        trainer.loop.step()
        assert trainer.loop.head.version == version
        assert all(weight.equal(before[name]) for name, weight in trainer.weights().items()) is (version == 0)
        assert proxy.get("")["state"] == ("paused" if version == 0 else "active")
