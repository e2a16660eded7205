"""`python -m trainer fit` with the real proxy: what is learnt, what is published, and that failures leave nothing
behind."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog
import torch
from sqlalchemy import Connection, select
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from proxy.cli.datasets import DatasetWriter
from proxy.cli.local_keys import LocalKeys
from proxy.cli.stack import Address
from proxy.contract.claim import CommitReply, CommitRequest
from proxy.contract.identifiers import SessionId
from proxy.contract.policy import Probe
from proxy.database.tables import PolicyVersionRow, SessionRow
from tests.trainer.publish.test_probe import recomputed
from tests.trainer.real_proxy import ADMIN, RUN, TRAINER, RealProxy, real_proxy, write_real_model
from tests.trainer.tiny import load_tiny
from trainer.config import BatchSettings, PreferenceForm
from trainer.fit.command import CANNOT, INTERRUPTED, WRONG, main
from trainer.fit.fitting import Imitation, Preferences
from trainer.fit.records import Examples, Pairs, Selection, examples_of, lines_of, pairs_of
from trainer.models.state_dict import load_weights
from trainer.proxy_client import ProxyClient
from trainer.replay.command import IMPOSSIBLE
from trainer.replay.command import main as replay

ROWS = BatchSettings(max_tokens_per_microbatch=128)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("fit") / "base")


@pytest.fixture
def proxy(base: Path, tmp_path: Path) -> Iterator[RealProxy]:
    with real_proxy(tmp_path, base) as running:
        yield running


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the changes that the command makes to its process, since it is meant for a process of its own."""
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", TRAINER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before, logging = signal.getsignal(signal.SIGTERM), structlog.get_config()
    yield
    structlog.configure(**logging)
    signal.signal(signal.SIGTERM, before)
    torch.set_flush_denormal(False)


def arguments(proxy: RealProxy, kind: str, *words: str) -> list[str]:
    values = {"threads": "1", "device": "cpu", "weights.directory": str(proxy.weights)}
    values |= {"batch.max_tokens_per_microbatch": "128"}
    told = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return [kind, "--run", RUN, "--proxy", proxy.url, "--learning-rate", "1e-2", "--json", *told, *words]


def fit(proxy: RealProxy, capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    status = main(arguments(proxy, kind, *words))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    (answer,) = [line for line in captured.out.splitlines() if line.startswith('{"kind"')]
    outcome: dict[str, Any] = json.loads(answer)
    return outcome


def refused(proxy: RealProxy, capsys: pytest.CaptureFixture[str], status: int, kind: str, *words: str) -> str:
    assert main(arguments(proxy, kind, *words)) == status
    assert proxy.get("/versions")["versions"][0]["version"] == 0
    return capsys.readouterr().err


def prefer(proxy: RealProxy, chosen: str, rejected: str, source: str = "ada") -> None:
    body = {"chosen": chosen, "rejected": rejected, "source": source}
    answer = httpx.post(
        f"{proxy.url}/v1/feedback/preference", json=body, headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert answer.status_code == 201, answer.text


def exported(proxy: RealProxy, path: str) -> list[bytes]:
    client = ProxyClient(proxy.url, TRAINER, RUN)
    try:
        return list(client.lines(path, []))
    finally:
        client.close()


def model_at(proxy: RealProxy, weights: str | None) -> Any:
    model = load_tiny(proxy.base)
    if weights is not None:
        load_weights(model.named_weights(), Path(weights))
    return model


def sessions(proxy: RealProxy, ids: Sequence[SessionId]) -> Examples:
    return examples_of(exported(proxy, "/export"), Selection(sessions=tuple(ids)), 64)


def preferences(proxy: RealProxy) -> Pairs:
    return pairs_of(exported(proxy, "/export/preferences"), Selection(), 64)


def stored_probe(proxy: RealProxy) -> Probe:
    """Return the probe of version 1 in the proxy's store."""

    def read(connection: Connection) -> Any:
        return connection.execute(select(PolicyVersionRow.probe).where(PolicyVersionRow.version == 1)).scalar_one()

    return msgspec.convert(proxy.do(proxy.world.database.read(read)), Probe)


def test_imitated_sessions_are_more_likely_afterwards(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = [proxy.session(1.0) for _ in range(8)]
    for reward in (0.0, None):
        proxy.session(reward)
    curves = ("--set", 'metrics.sinks=["tensorboard"]', "--set", f"metrics.directory={tmp_path / 'curves'}")
    words = ("--min-reward", "0.5", "--epochs", "4", "--batch", "4", "--held-out", "0.25", *curves)
    outcome = fit(proxy, capsys, "sft", *words)
    assert (outcome["version"], outcome["fitted"], outcome["held_out"], outcome["dropped"]) == (1, 6, 2, 0)
    likelihood = []
    for weights in (None, outcome["weights"]):
        model = model_at(proxy, weights)
        likelihood.append(-Imitation(model, ROWS, CPU).evaluate(sessions(proxy, good).examples)["loss"])
    assert likelihood[1] > likelihood[0] + 0.5

    inputs = proxy.get("/steps/1")["inputs"]
    learnt = set(inputs["fit"]["sessions"])
    assert learnt < set(good)
    assert len(learnt) == 6
    assert (inputs["fit"]["kind"], inputs["fit"]["steps"], inputs["fit"]["options"]["min_reward"]) == ("sft", 8, 0.5)
    probe = stored_probe(proxy)
    assert probe.logprobs == pytest.approx(recomputed(probe, Path(outcome["weights"])), abs=1e-4)
    newest = proxy.get("/versions")["versions"][0]
    assert newest["metrics"]["held_out_loss"] == pytest.approx(outcome["held_out_loss"])
    held_back = [example for example in sessions(proxy, good).examples if example.id not in learnt]
    before = Imitation(model_at(proxy, None), ROWS, CPU).evaluate(held_back)["loss"]
    assert outcome["held_out_loss_before"] == pytest.approx(before, rel=1e-4)
    assert replay([RUN, "1", "--proxy", proxy.url]) == IMPOSSIBLE
    assert "fitted to 6 sessions (sft)" in capsys.readouterr().err

    (curve,) = (tmp_path / "curves" / "tensorboard").iterdir()
    events = EventAccumulator(str(curve))
    events.Reload()
    losses = [event.value for event in events.Scalars("loss")]
    assert [event.step for event in events.Scalars("learning_rate")] == list(range(1, 9))
    assert sum(losses[-2:]) / 2 == pytest.approx(outcome["loss"], rel=1e-5)
    found = [(event.step, event.value) for event in events.Scalars("held_out_loss")]
    assert found == [
        (0, pytest.approx(outcome["held_out_loss_before"])),
        (8, pytest.approx(outcome["held_out_loss"])),
    ]


def test_preferences_widen_the_margin(proxy: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(8):
        prefer(proxy, proxy.session(None), proxy.session(None), source="ada" if index else "bob")
    outcome = fit(proxy, capsys, "dpo", "--epochs", "3", "--batch", "4", "--held-out", "0", "--source", "ada")
    assert (outcome["version"], outcome["fitted"]) == (1, 7)
    pairs = preferences(proxy).pairs
    model = model_at(proxy, None)
    objective = Preferences(model, ROWS, CPU, PreferenceForm.SIGMOID, 0.1, 0.0)
    objective.remember(pairs)
    load_weights(model.named_weights(), Path(outcome["weights"]))
    figures = objective.evaluate(pairs)
    assert figures["margin"] > 0.2
    assert figures["accuracy"] >= 7 / 8
    record = proxy.get("/steps/1")["inputs"]["fit"]
    assert (len(record["sessions"]), len(record["preferences"])) == (14, 7)
    assert record["options"]["beta"] == 0.1


def test_a_reward_model_ranks_pairs_that_it_has_not_seen(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rule: answers with large ids are better."""
    from transformers import AutoModelForSequenceClassification

    # Which pairs are held out depends on their ids, which are random. Half as many pairs and epochs were too few for
    # one choice in eight.
    for _ in range(48):
        prefer(proxy, proxy.session(None), proxy.session(None, highest=32))
    output = tmp_path / "judges" / "judge"
    words = ("--output", str(output), "--epochs", "8", "--batch", "8", "--held-out", "0.33")
    outcome = fit(proxy, capsys, "reward-model", *words)
    assert outcome["held_out"] == 16
    assert outcome["held_out_accuracy"] >= 7 / 8
    assert outcome["held_out_loss"] < outcome["held_out_loss_before"]
    judge: Any = AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float32)
    scores = [judge(input_ids=torch.tensor([[1, 2, 3, *ids]])).logits.item() for ids in ([50, 51, 52], [3, 4, 5])]
    assert scores[0] > scores[1]
    assert json.loads((output / "base_rl.json").read_text())["version"] == 0
    assert (output / "tokenizer.json").is_file()
    assert refused(proxy, capsys, WRONG, "reward-model", "--output", str(output)).startswith("--output")


def test_an_export_gives_the_same_result_as_the_proxy(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    good = [proxy.session(1.0) for _ in range(4)]
    prefer(proxy, good[0], good[1])
    for name, suffix, preferences_ in (
        ("lines", "jsonl", False),
        ("rows", "parquet", False),
        ("pairs", "jsonl", True),
    ):
        writer = DatasetWriter(tmp_path / name, suffix=suffix, preferences=preferences_)
        for line in exported(proxy, "/export/preferences" if preferences_ else "/export"):
            writer.add(line)
        writer.finish(RUN)
    chosen = Selection(min_reward=0.5)
    of_proxy = examples_of(exported(proxy, "/export"), chosen, 64)
    assert len(of_proxy.examples) == 4
    for name in ("lines", "rows"):
        assert _tokens(examples_of(lines_of(tmp_path / name), chosen, 64)) == _tokens(of_proxy)
    assert pairs_of(lines_of(tmp_path / "pairs"), Selection(), 64).pairs[0].id == preferences(proxy).pairs[0].id
    told = refused(proxy, capsys, CANNOT, "sft", "--all", "--from", str(tmp_path / "pairs"))
    assert "base-rl-preference/1" in told
    assert "no .jsonl" in refused(proxy, capsys, CANNOT, "sft", "--all", "--from", str(tmp_path / "nowhere"))
    _write_rows(tmp_path / "foreign.parquet", [{"format": "base-rl/1", "turns": [{"text": "hello"}]}])
    assert "none that base-rl exported" in refused(
        proxy, capsys, CANNOT, "sft", "--all", "--from", str(tmp_path / "foreign.parquet")
    )
    outcome = fit(proxy, capsys, "sft", "--from", str(tmp_path / "rows"), "--session", good[2], "--held-out", "0")
    assert (outcome["version"], outcome["fitted"]) == (1, 1)
    assert proxy.get("/steps/1")["inputs"]["fit"]["options"]["from"] == "rows"


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def _tokens(found: Examples) -> Any:
    return sorted(
        (
            each.id,
            [(turn.prompt_ids, turn.output_ids, turn.parent, turn.prefix_tokens) for turn in each.trajectory.turns],
        )
        for each in found.examples
    )


def test_evaluated_unfinished_and_foreign_sessions_are_not_learnt(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, evaluated, unfinished = [proxy.session(1.0) for _ in range(3)]
    proxy.session(1.0, highest=64 + 32)  # ids that the model does not have
    proxy.change(SessionRow, SessionRow.id == evaluated, purpose="eval")
    proxy.change(SessionRow, SessionRow.id == unfinished, state="open")
    outcome = fit(proxy, capsys, "sft", "--all", "--dry-run")
    assert (outcome["fitted"], outcome["dropped"], outcome["from_version"]) == (1, 1, 0)
    assert [each.id for each in sessions(proxy, [kept, evaluated, unfinished]).examples] == [kept]
    assert proxy.get("/versions")["versions"][0]["version"] == 0


@pytest.mark.parametrize("arrived", [True, False])
def test_a_process_that_ends_in_its_commit_leaves_nothing_half_done(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    for _ in range(4):
        proxy.session(1.0)
    commit = ProxyClient.commit

    def ended(client: ProxyClient, request: CommitRequest) -> CommitReply:
        if arrived:
            commit(client, request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProxyClient, "commit", ended)
        assert main(arguments(proxy, "sft", "--all")) == INTERRUPTED
    assert len(list(proxy.weights.glob("*/v*"))) == 1
    outcome = fit(proxy, capsys, "sft", "--all")
    versions = [each["version"] for each in proxy.get("/versions")["versions"]]
    assert outcome["version"] == 1 + arrived
    assert versions == list(range(1 + arrived, -1, -1))
    left = list(proxy.weights.glob("*/v*"))
    assert len(left) == 1 + arrived
    assert not list(proxy.weights.glob("*/*/.uncommitted"))


def test_the_first_of_trainer_and_fit_to_commit_wins(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = ProxyClient.commit
    with proxy.trainer(algorithm={"mini_batches": 1}) as trainer:
        proxy.group([1.0, 0.0, 0.5, 0.0])

        def beaten(client: ProxyClient, request: CommitRequest) -> CommitReply:
            patch.undo()
            trainer.loop.step()
            return commit(client, request)

        with monkeypatch.context() as patch:
            patch.setattr(ProxyClient, "commit", beaten)
            assert main(arguments(proxy, "sft", "--all")) == CANNOT
        assert "pause the run" in capsys.readouterr().err
        assert trainer.loop.head.version == 1
        assert len(list(proxy.weights.glob("*/v*"))) == 1

        moments = {name: value.clone() for name, value in _moments(trainer.learner).items()}
        outcome = fit(proxy, capsys, "sft", "--all")
        assert outcome["version"] == 2
        proxy.group([1.0, 0.0, 0.5, 0.0], version=2)
        trainer.loop.step()  # notices that the head has moved
        assert trainer.loop.head.version == 2
        assert trainer.learner.steps == 1, "the schedule goes on"
        for name, value in _moments(trainer.learner).items():
            torch.testing.assert_close(value, moments[name])
        trainer.loop.step()
        assert trainer.loop.head.version == 3


def _moments(learner: Any) -> dict[str, torch.Tensor]:
    state = learner.capture()["optimizer"]
    return {name: values["exp_avg"] for name, values in state.items()}


def test_contradictory_options_are_refused(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--min-reward" in refused(proxy, capsys, WRONG, "sft")
    for words, said in (
        (("sft", "--all", "--held-out", "1"), "--held-out"),
        (("sft", "--all", "--epochs", "0"), "--epochs"),
        (("dpo", "--label-smoothing", "0.5"), "--label-smoothing"),
        (("dpo", "--loss", "ipo", "--label-smoothing", "0.1"), "ipo has none"),
        (("dpo", "--beta", "0"), "--beta"),
        (("sft", "--all", "--set", "no.such=1"), "no such option"),
    ):
        assert said in refused(proxy, capsys, WRONG, *words), words
    assert "no preferences to learn from" in refused(proxy, capsys, CANNOT, "dpo")
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", "rl-other")
    assert "not a key of this proxy" in refused(proxy, capsys, CANNOT, "dpo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in refused(proxy, capsys, WRONG, "dpo")


@pytest.mark.end_to_end
def test_it_ends_cleanly_when_asked_to(proxy: RealProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """`base-rl fit`, which finds proxy, key and weights in the data directory, is asked to end between its epochs."""
    for _ in range(4):
        proxy.session(1.0)
    data_dir = proxy.weights.parent
    keys = LocalKeys(admin_key=ADMIN, run_key="rl-run", trainer_key=TRAINER)
    (data_dir / "keys.json").write_bytes(msgspec.json.encode(keys))
    (data_dir / "address.json").write_bytes(msgspec.json.encode(Address(url=proxy.url, pid=1)))
    monkeypatch.delenv("BASE_RL_TRAINER__API_KEY")
    words = ["sft", "--data-dir", str(data_dir), "--all", "--epochs", "1000000", "--set", "threads=1"]
    with subprocess.Popen(
        [sys.executable, "-m", "proxy.cli", "fit", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"step": "20/' in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(60) == INTERRUPTED
    assert "nothing was made" in rest
    assert "Traceback" not in rest
    assert not list(proxy.weights.glob("*/v*"))
