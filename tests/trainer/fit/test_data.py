"""`python -m trainer fit --data` with the real proxy: files make versions that are served and that name the files."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.proxy.tokens.models import write_model
from tests.small_models import small_qwen3
from tests.trainer.fit.test_command import CPU, ROWS, fit, process, refused  # noqa: F401 - `process` is a fixture
from tests.trainer.real_proxy import RUN, RealProxy, real_proxy
from tests.trainer.tiny import load_tiny
from trainer.fit.command import CANNOT, WRONG
from trainer.fit.fitting import Imitation
from trainer.fit.rendering import Renderer
from trainer.fit.rows import read_files
from trainer.models.state_dict import load_weights
from trainer.replay.command import IMPOSSIBLE
from trainer.replay.command import main as replay


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with weights for every token of the tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("data") / "base")
    torch.manual_seed(0)
    model = small_qwen3(vocab_size=512)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def proxy(base: Path, tmp_path: Path) -> Iterator[RealProxy]:
    with real_proxy(tmp_path, base) as running:
        yield running


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wait_until_served(proxy: RealProxy, version: int) -> None:
    end = time.monotonic() + 60
    while proxy.get("/versions")["versions"][0]["state"] != "serving":
        assert time.monotonic() < end
        threading.Event().wait(0.02)
    assert proxy.get("/versions")["versions"][0]["version"] == version


def asked(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {number} + {number}?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def loss(proxy: RealProxy, path: Path, weights: str | None) -> float:
    """Return the mean negative log-likelihood of the file's answers under a version."""
    model = load_tiny(proxy.base)
    if weights is not None:
        load_weights(model.named_weights(), Path(weights))
    items = read_files("sft", [path], Renderer(proxy.base, 512), 512).items
    return Imitation(model, ROWS, CPU).evaluate(items)["loss"]


def test_conversations_of_a_file_make_a_version_that_is_served(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"messages": [asked(number), answer(f"The answer is {2 * number}.")]} for number in range(12)]
    path = written(tmp_path / "chats.jsonl", [*rows, {"messages": [asked(1), answer("42 " * 999)]}])
    words = ("--data", str(path), "--epochs", "3", "--batch", "4", "--held-out", "0.25")
    outcome = fit(proxy, capsys, "sft", *words)
    counts = (outcome["version"], outcome["fitted"], outcome["held_out"], outcome["dropped_because"])
    assert counts == (1, 9, 3, {"too_long": 1})
    assert loss(proxy, path, outcome["weights"]) < loss(proxy, path, None) - 0.5
    assert outcome["held_out_loss"] < outcome["held_out_loss_before"]

    record = proxy.get("/steps/1")["inputs"]["fit"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["files"] == [{"name": "chats.jsonl", "sha256": digest, "rows": 13}]
    assert record["sessions"] == []
    wait_until_served(proxy, 1)
    assert replay([RUN, "1", "--proxy", proxy.url]) == IMPOSSIBLE
    assert "fitted to 13 rows of chats.jsonl (sft)" in capsys.readouterr().err


def test_pairs_of_a_file_widen_the_margin(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        {"prompt": [asked(number)], "chosen": [answer("The answer is 4.")], "rejected": [answer("No.")]}
        for number in range(8)
    ]
    path = written(tmp_path / "pairs.jsonl", rows)
    outcome = fit(proxy, capsys, "dpo", "--data", str(path), "--epochs", "2", "--batch", "4")
    assert outcome["held_out_margin"] > 0.01 > abs(outcome["held_out_margin_before"])
    output = tmp_path / "judge"
    words = ("--data", str(path), "--output", str(output), "--epochs", "2", "--batch", "4")
    outcome = fit(proxy, capsys, "reward-model", *words)
    assert outcome["held_out_accuracy"] == 1.0
    about = json.loads((output / "base_rl.json").read_text())
    assert [file["name"] for file in about["fit"]["files"]] == ["pairs.jsonl"]


def test_labels_of_a_file_separate_good_from_bad(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        {
            "prompt": [asked(number)],
            "completion": [answer("The answer is 4." if number % 2 else "No.")],
            "label": bool(number % 2),
        }
        for number in range(12)
    ]
    path = written(tmp_path / "labels.jsonl", rows)
    words = ("--data", str(path), "--epochs", "3", "--batch", "4", "--held-out", "0.34")
    outcome = fit(proxy, capsys, "kto", *words)
    assert outcome["version"] == 1
    assert outcome["held_out_loss"] < outcome["held_out_loss_before"] == pytest.approx(0.5)
    options = proxy.get("/steps/1")["inputs"]["fit"]["options"]
    assert (options["beta"], options["desirable_weight"]) == (0.1, 1.0)


def test_rewards_of_sessions_separate_good_from_bad(proxy: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule: ids below 32 are good, others bad."""
    for _ in range(16):
        proxy.session(1.0, highest=32)
        proxy.session(0.0)
    proxy.session(None)
    words = ("--threshold", "0.5", "--epochs", "4", "--batch", "6", "--held-out", "0.25")
    outcome = fit(proxy, capsys, "kto", *words)
    assert (outcome["version"], outcome["fitted"], outcome["held_out"]) == (1, 24, 8)
    assert outcome["dropped_because"] == {"no_reward": 1}
    assert outcome["held_out_loss"] < outcome["held_out_loss_before"]
    record = proxy.get("/steps/1")["inputs"]["fit"]
    assert (len(record["sessions"]), record["options"]["threshold"]) == (24, 0.5)


def test_contradictory_options_for_files_are_refused(
    proxy: RealProxy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "rows.jsonl", [{"messages": [asked(1), answer("2")]}, {"text": "x"}])
    data = ("--data", str(path))
    for words, status, said in (
        (("kto",), WRONG, "say which sessions are desirable"),
        (("sft", "--min-reward", "0", *data), WRONG, "--min-reward: it is about sessions"),
        (("sft", "--from", "x", *data), WRONG, "--from: it is about sessions"),
        (("kto", "--threshold", "0.5", *data), WRONG, "--threshold: it is about sessions"),
        (("kto", "--desirable-weight", "0", *data), WRONG, "--desirable-weight: a number above 0"),
        (("sft", *data), CANNOT, "rows.jsonl, row 2: there is no column 'prompt'"),
        (("sft", "--data", str(tmp_path / "none.jsonl")), CANNOT, "there is no such file"),
        (("kto", "--threshold", "0.5"), CANNOT, "no sessions to learn from"),
    ):
        assert said in refused(proxy, capsys, status, *words), words
    alone = written(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    said = refused(proxy, capsys, CANNOT, "kto", "--data", str(alone), "--held-out", "0")
    assert "two examples at least" in said
