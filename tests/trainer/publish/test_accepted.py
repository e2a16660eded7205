from __future__ import annotations

import pytest

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head, WeightsFormat
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.publish.accepted import Accepted


def head(kind: str, formats: tuple[WeightsFormat, ...] | None = None) -> Head:
    return Head(
        run_id=RunId("run_1"),
        run_name="shop",
        version=0,
        base_model="base",
        weights=None,
        formats=formats,
        weights_kind=kind,
    )


def test_a_trainer_of_whole_weights_refuses_a_run_of_adapters_before_it_trains() -> None:
    for adapter in (None, {"publish": "merged"}):
        settings = TrainerSettings.model_validate({"adapter": adapter})
        Accepted(settings).check(head("full"))
        with pytest.raises(ConfigurationError, match=r"^trainer\.adapter: the run 'shop' .*publish = \"adapter\""):
            Accepted(settings).check(head("adapter"))


def test_adapters_are_checked_until_the_formats_of_the_engine_are_known() -> None:
    accepted = Accepted(TrainerSettings.model_validate({"adapter": {"publish": "adapter"}}))
    accepted.check(head("adapter"))
    assert accepted.is_unknown
    with pytest.raises(ConfigurationError, match=r"^trainer\.adapter\.publish: "):
        accepted.check(head("adapter", (WeightsFormat.HUGGINGFACE,)))
    accepted.check(head("adapter", (WeightsFormat.HUGGINGFACE, WeightsFormat.ADAPTER)))
    assert not accepted.is_unknown
