"""The probe of a version: the log-probabilities that transformers and peft compute from the published files, whatever
the layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proxy.contract.policy import Probe
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.together import together
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import load_tiny, settings
from trainer.config import Precision, TrainerSettings
from trainer.loading import load_learnt
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.publish.probe import probe_ids, probe_of

CPU = torch.device("cpu")


def recomputed(probe: Probe, directory: Path, adapter: Path | None = None) -> list[float]:
    """Return the log-probabilities of the probe's ids by transformers in float32, with peft's adapter over them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls transformers by a deprecated name
            network = PeftModel.from_pretrained(network, str(adapter))
    ids = torch.tensor([probe.ids])
    with torch.no_grad():
        logprobs = network.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bfloat16"},
        {"backend": "archon", "precision": "bfloat16"},
        {"adapter": {"rank": 2, "dropout": 0.5}},
        {"adapter": {"rank": 2, "publish": "merged"}, "precision": "bfloat16"},
    ],
    ids=["whole", "bfloat16", "archon", "adapter", "merged"],
)
def test_the_published_files_give_the_committed_log_probabilities(
    start: Start, tiny_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path, optimizer={"learning_rate": 3e-2}, **changes))
    trainer.loop.resume()
    trainer.loop.step()
    trainer.loop.step()
    probes = []
    for commit in proxy.commits:
        assert commit.probe is not None
        probes.append(commit.probe)
        directory = Path(commit.weights.uri)
        is_adapter = (directory / "adapter_config.json").exists()
        where = (tiny_model, directory) if is_adapter else (directory,)
        assert commit.probe.logprobs == pytest.approx(recomputed(commit.probe, *where), abs=1e-4)
    assert probes[0].ids == probes[1].ids
    moved = [abs(one - other) for one, other in zip(*(probe.logprobs for probe in probes), strict=True)]
    assert max(moved) > 1e-2, "other weights give other numbers"


def scored(ranks: Ranks, cases: list[tuple[Path, TrainerSettings]]) -> list[Probe | None]:
    """Return the probe of each model, divided among the ranks as its settings say."""
    found = []
    for directory, configured in cases:
        arranged = ranks.arranged(layout_of(configured))
        found.append(probe_of(load_learnt(directory, configured, arranged), ranks.device))
    return found


@pytest.mark.archon
@pytest.mark.timeout(300)
def test_every_layout_gives_the_log_probabilities_of_the_whole_model(tmp_path: Path) -> None:
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    save_random(dense, "qwen3")
    save_random(sparse, "qwen3_moe")
    layouts = [(dense, "d2t2"), (dense, "r2c2"), (dense, "d2p2"), (sparse, "t2c2e4")]
    cases = [(base, TrainerSettings(layout=layout, precision=Precision.BFLOAT16)) for base, layout in layouts]
    cases += [(dense, TrainerSettings()), (dense, TrainerSettings.model_validate({"adapter": {"rank": 2}}))]
    for (base, configured), probe in zip(cases, together(4, scored, cases), strict=True):
        assert probe.logprobs == pytest.approx(recomputed(probe, base), abs=1e-4), configured.layout


@pytest.mark.parametrize("vocabulary", [1, 5, 64, 257, 151_936])
def test_the_ids_are_of_the_vocabulary(vocabulary: int) -> None:
    ids = probe_ids(vocabulary)
    assert all(0 <= each < vocabulary for each in ids)
    assert len(set(ids)) == min(len(ids), max(1, vocabulary // 2))


def test_weights_that_are_not_finite_have_no_probe(tiny_model: Path) -> None:
    model = load_tiny(tiny_model)
    nn.init.constant_(next(iter(model.parameters())), float("nan"))
    assert probe_of(model, CPU) is None
