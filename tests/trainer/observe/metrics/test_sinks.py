"""Configured sinks: a missing package or a contradiction is an error at the start."""

from __future__ import annotations

import pytest

from trainer.config import MetricsSettings, SinkName, load_settings
from trainer.errors import ConfigurationError
from trainer.observe.metrics.sink import flat
from trainer.observe.metrics.sinks import check_installed


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else object())
    check_installed([SinkName.TENSORBOARD, SinkName.WANDB, SinkName.MLFLOW])
    remedy = r"trackio needs .* pip install -c constraints.txt -e '\.\[trackio\]'"
    with pytest.raises(ConfigurationError, match=remedy):
        check_installed([SinkName.TENSORBOARD, SinkName.TRACKIO])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"wandb": {"mode": "offline"}}, "wandb is set up, and is not one of sinks"),
        ({"sinks": ["wandb"], "mlflow": {"tracking_uri": "http://m"}}, "mlflow is set up"),
        ({"sinks": ["tensorboard"], "project": "p"}, "project is for wandb, mlflow and trackio"),
        ({"sinks": ["tensorboard", "tensorboard"]}, "names one twice"),
        ({"sinks": ["neptune"]}, "Input should be 'tensorboard', 'wandb', 'mlflow' or 'trackio'"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_settings(overrides={"metrics": given}, environment={})


def test_the_environment_names_sinks_and_directories_follow_the_data_directory() -> None:
    settings = load_settings(
        environment={"BASE_RL_TRAINER__METRICS__SINKS": '["wandb"]', "BASE_RL_SERVER__DATA_DIR": "/data"}
    )
    assert settings.metrics == MetricsSettings(sinks=(SinkName.WANDB,), directory=settings.metrics.directory)
    assert [str(each.directory) for each in (settings.metrics, settings.profile, settings.weights)] == [
        "/data/metrics",
        "/data/profiles",
        "/data/weights",
    ]


def test_sinks_do_not_change_the_configurations_hash() -> None:
    plain = load_settings(environment={})
    told = load_settings(overrides={"metrics": {"sinks": ["wandb"]}, "profile": {"steps": 3}}, environment={})
    assert plain.config_hash() == told.config_hash()


def test_nested_settings_become_dotted_names() -> None:
    assert flat({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == {"a.b": 1, "a.c.d": None, "e": [1, 2]}
