"""The engines that a configuration names."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.serving.configured import engine_specs
from proxy.settings import ConfigurationError, Settings, load_settings

FIRST = "http://127.0.0.1:1"


def settings(**sections: Any) -> Settings:
    values: dict[str, Any] = {"engine": {"url": FIRST}, "run": {"name": "shop", "model": "base/model"}}
    return load_settings(None, {**values, **sections})


def test_the_only_run_has_the_engines_of_its_configuration_for_itself() -> None:
    replicas = settings(engine={"url": FIRST, "replica_urls": ["http://127.0.0.1:2"]})
    specs = [(spec.name, spec.url, spec.base_model, spec.run) for spec in engine_specs(replicas)]
    assert specs == [
        ("engine", FIRST, "base/model", "shop"),
        ("engine-2", "http://127.0.0.1:2", "base/model", "shop"),
    ]


def test_engines_are_shared_by_declared_runs_and_by_adapter_runs() -> None:
    for shared in (
        settings(runs={"other": {"model": "base/model"}}),
        settings(run={"name": "shop", "model": "base/model", "weights": "adapter"}),
    ):
        assert [spec.run for spec in engine_specs(shared)] == [None]


def test_a_further_engine_has_the_model_of_its_run() -> None:
    tables = {
        "own": {"url": "http://own:1", "run": "large"},
        "any": {"url": "http://any:1"},
        "named": {"url": "http://named:1", "model": "third/model"},
    }
    specs = engine_specs(settings(runs={"large": {"model": "large/model"}}, engines=tables))
    assert [(spec.name, spec.base_model, spec.run) for spec in specs] == [
        ("engine", "base/model", None),
        ("own", "large/model", "large"),
        ("any", "base/model", None),
        ("named", "third/model", None),
    ]


def test_one_address_is_one_engine() -> None:
    twice = settings(engines={"again": {"url": f"{FIRST}/"}})
    with pytest.raises(ConfigurationError, match=r"engines\.again\.url: .* address of the engine 'engine' already"):
        engine_specs(twice)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engines": {"engine-2": {"url": FIRST}}}, "choose another name"),
        ({"engines": {"a": {}}}, r"engines\.a\.url"),
        ({"engines": {"a": {"url": "here"}}}, r"engines\.a\.url"),
        ({"engine": {"kind": FIRST, "replicas": 2}}, r"engine\.replicas: .*\[engines.NAME\] table"),
    ],
)
def test_a_wrong_engine_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(**sections)
