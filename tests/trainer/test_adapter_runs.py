"""A run that trains an adapter: the loop, its restarts, a rollback, and replayed steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.policy import WeightsFormat
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import TRAINER, real_proxy, write_real_model
from tests.trainer.test_loop import random_groups, same
from tests.trainer.test_replay import mixed, replay
from tests.trainer.tiny import ALONE, load_tiny, settings
from trainer import assembly
from trainer.assembly import RunTrainer, Shared
from trainer.config import AdapterPublish, TrainerSettings, load_settings
from trainer.errors import ConfigurationError
from trainer.models.state_dict import read_weights
from trainer.parallel.mesh import join
from trainer.proxy_client import ProxyClient

HELD = {"kl_coefficient": 0.1, "mini_batches": 2}


def adapter_settings(
    directory: Path, publish: AdapterPublish = AdapterPublish.ADAPTER, **shape: Any
) -> TrainerSettings:
    return settings(
        directory,
        optimizer={"learning_rate": 1e-2, "warmup_steps": 6, "weight_decay": 0.1},
        algorithm=HELD,
        adapter={"rank": 2, "publish": publish.value, **shape},
    )


@pytest.mark.parametrize("publish", list(AdapterPublish))
def test_restarts_change_nothing(start: Start, tiny_model: Path, tmp_path: Path, publish: AdapterPublish) -> None:
    configured = adapter_settings(tmp_path, publish)
    undisturbed_proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    undisturbed = start(undisturbed_proxy, configured)
    undisturbed.loop.resume()
    for _ in range(4):
        undisturbed.loop.step()
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    for _ in range(2):
        trainer = start(proxy, configured)
        trainer.loop.resume()
        trainer.loop.step()
        trainer.loop.step()
    assert proxy.version == undisturbed_proxy.version == 4
    assert same(trainer.weights(), undisturbed.weights())
    digests = [[commit.weights.sha256 for commit in each.commits] for each in (proxy, undisturbed_proxy)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4
    form = WeightsFormat.ADAPTER if publish is AdapterPublish.ADAPTER else WeightsFormat.HUGGINGFACE
    assert {commit.weights.format for commit in proxy.commits} == {form}


def test_a_run_continues_when_the_published_form_changes(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """An engine that accepts no adapters gets the next version merged; the optimiser state is kept."""
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    for publish in (AdapterPublish.ADAPTER, AdapterPublish.MERGED, AdapterPublish.ADAPTER):
        trainer = start(proxy, adapter_settings(tmp_path, publish))
        trainer.loop.resume()
        steps = trainer.learner.steps
        trainer.loop.step()
        assert trainer.learner.steps == steps + 2 == 2 * proxy.version
    merged = read_weights(Path(proxy.commits[1].weights.uri))
    base = {name: weight.detach() for name, weight in load_tiny(tiny_model).named_weights()}
    changed = {name for name, weight in base.items() if not torch.equal(weight, merged[name])}
    assert merged.keys() == base.keys()
    assert changed == {name for name in base if name.split(".")[-2].endswith("_proj")}


def test_a_rollback_restores_the_adapter(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, adapter_settings(tmp_path))
    trainer.loop.resume()
    weights = [trainer.weights()]
    for _ in range(2):
        trainer.loop.step()
        weights.append(trainer.weights())
    assert not same(weights[0], weights[1])
    proxy.move_head(3, proxy.commits[0].weights)
    trainer.loop.resume()
    assert same(trainer.weights(), weights[1])
    assert trainer.learner.steps == 2
    proxy.move_head(4, None)
    trainer.loop.resume()
    assert same(trainer.weights(), weights[0])
    assert trainer.learner.steps == 0


@pytest.mark.parametrize("publish", list(AdapterPublish))
def test_steps_of_an_adapter_are_replayed_bit_for_bit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    publish: AdapterPublish,
) -> None:
    """The second step is replayed from its parent's directory, the first from the base and the seed."""
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", TRAINER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    adapter = {"rank": 2, "publish": publish.value}
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(adapter=adapter, algorithm=HELD, seed=3) as trainer:
            for version in range(2):
                mixed(proxy, version=version)
                trainer.loop.step()
            assert trainer.loop.head.version == 2
        for version in (1, 2):
            status, verdict = replay(proxy, version, capsys, "--verify")
            torch.set_flush_denormal(False)
            assert (status, verdict["identical"], verdict["replayed"]) == (0, True, [version])
            assert verdict["committed_loss"] == verdict["replayed_loss"]


WHOLE, BOTH = (WeightsFormat.HUGGINGFACE,), tuple(WeightsFormat)
ONLY_WHOLE = "loads whole weights only, .*set trainer.adapter.publish = merged"


def beginning(proxy: TrainingProxy, configured: TrainerSettings, monkeypatch: pytest.MonkeyPatch) -> RunTrainer:
    """Start a trainer at the fake proxy as a process does."""
    made = partial(ProxyClient, transport=proxy.transport(), pause=lambda _: None)
    monkeypatch.setattr(assembly, "ProxyClient", made)
    return assembly.begin(configured.run, configured, ALONE, "a-process", Shared(ALONE.device))


@pytest.mark.parametrize("publish", list(AdapterPublish))
@pytest.mark.parametrize("formats", [WHOLE, BOTH, None])
def test_an_engine_that_cannot_load_adapters_is_an_error_at_the_start(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    formats: tuple[WeightsFormat, ...] | None,
    publish: AdapterPublish,
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), formats=formats)
    configured = adapter_settings(tmp_path, publish)
    if formats == WHOLE and publish is AdapterPublish.ADAPTER:
        with pytest.raises(ConfigurationError, match=ONLY_WHOLE):
            beginning(proxy, configured, monkeypatch)
    else:
        beginning(proxy, configured, monkeypatch).ending.close()


def test_an_engine_unreachable_at_the_start_is_asked_before_the_first_step(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, adapter_settings(tmp_path))
    trainer.loop.resume()
    proxy.formats = WHOLE
    with pytest.raises(ConfigurationError, match=ONLY_WHOLE):
        trainer.loop.step()
    trainer.claims.give_back()
    assert (proxy.commits, proxy.leases) == ([], {})
    proxy.formats = BOTH
    trainer.loop.step()
    proxy.formats = WHOLE  # from here on the proxy must not send the adapter to the engine
    trainer.loop.step()
    assert proxy.version == 2


def test_an_adapter_is_for_the_fsdp_backend() -> None:
    with pytest.raises(ConfigurationError, match='an adapter belongs to backend = "fsdp"'):
        load_settings(overrides={"backend": "archon", "adapter": {}}, environment={})


def test_offloading_is_for_the_fsdp_backend_and_from_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match='offload belongs to backend = "fsdp"'):
        load_settings(overrides={"backend": "archon", "offload": True}, environment={})
    with pytest.raises(ConfigurationError, match=r"trainer\.offload: .* in CPU memory already"):
        join("cpu", offload=True)


def test_the_published_form_is_not_in_the_configurations_hash() -> None:
    hashes = [
        load_settings(overrides={"adapter": adapter}, environment={}).config_hash()
        for adapter in (None, {}, {"publish": "merged"}, {"rank": 4})
    ]
    assert hashes[1] == hashes[2]
    assert len(set(hashes)) == 3
