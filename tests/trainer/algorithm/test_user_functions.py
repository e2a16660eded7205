"""Functions in a user's file: loading, the trial at the start, and the error for each mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.__main__ import main
from trainer.algorithm.parts import as_json, from_json
from trainer.algorithm.presets import resolve
from trainer.algorithm.trial import made_up_sessions, made_up_tokens, try_functions
from trainer.algorithm.user_functions import call_advantage, call_filter, call_loss
from trainer.config import AlgorithmSettings, load_settings
from trainer.errors import ConfigurationError, UserFunctionFailed

GOOD = """
import torch
from torch import Tensor

from trainer.algorithm.custom import LossInputs, Session


def loss(inputs: LossInputs) -> Tensor:
    ratio_N = (inputs.logprobs_N - inputs.proximal_N).exp()
    return -torch.minimum(ratio_N * inputs.advantages_N, ratio_N.clamp(0.8, 1.2) * inputs.advantages_N)


def advantage(sessions: list[Session]) -> list[list[float]]:
    return [[(session.reward or 0.0) - 0.5] * len(session.turns) for session in sessions]


def keep(sessions: list[Session]) -> list[bool]:
    return [session.reward != 100.0 for session in sessions]
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.py"
    path.write_text(text)
    return path


def tried(path: Path, **names: str) -> None:
    parts: dict[str, Any] = {part: f"{path}:{name}" for part, name in names.items()}
    try_functions(resolve(AlgorithmSettings.model_validate(parts)))


def test_good_functions_are_taken_and_do_what_they_say(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    tried(path, loss="loss", advantage="advantage", filter="keep")
    settings = AlgorithmSettings.model_validate(
        {"loss": f"{path}:loss", "advantage": f"{path}:advantage", "filter": f"{path}:keep"}
    )
    assert settings.loss is not None
    assert settings.advantage is not None
    assert settings.filter is not None
    inputs = made_up_tokens((2, 3), has_reference=False)
    terms = call_loss(settings.loss, inputs)
    ratio = (inputs.logprobs_N - inputs.proximal_N).exp()
    wanted = -torch.minimum(ratio * inputs.advantages_N, ratio.clamp(0.8, 1.2) * inputs.advantages_N)
    assert torch.equal(terms, wanted)
    sessions = made_up_sessions()
    assert call_advantage(settings.advantage, sessions)[0] == (0.5,)
    assert call_filter(settings.filter, sessions).count(False) == 1


MISTAKES: list[tuple[str, str, str]] = [
    ("loss", "def other(inputs): ...", "mine.py: there is no function 'loss' in it; it defines other"),
    ("loss", "x = 1", "there is no function 'loss' in it; it defines no function"),
    ("loss", "loss = 3", "there is no function 'loss'"),
    ("loss", "def loss(inputs) ->: ...", r"mine\.py:1: expected ':'$"),
    ("loss", "import torch\nimport no_such_package", r"mine\.py:2: ModuleNotFoundError: .* while the file was read"),
    ("loss", "raise SystemExit(3)", r"mine\.py:1: SystemExit: 3 while the file was read"),
    (
        "loss",
        "def loss(logprobs, advantages): ...",
        r"mine\.py:1: loss must take one argument, `def loss\(inputs\):` \(missing",
    ),
    ("loss", "def loss():\n    ...", r"`def loss\(inputs\):` \(too many positional arguments\)"),
    (
        "loss",
        "def helper(inputs):\n    return inputs.rewards_N\n\ndef loss(inputs):\n    return helper(inputs)",
        r"mine\.py:2: AttributeError: .*rewards_N.* in loss",
    ),
    ("loss", "def loss(inputs):\n    return None", r"mine\.py:1: loss returned NoneType; expected a tensor of shape"),
    (
        "loss",
        "def loss(inputs):\n    return inputs.logprobs_N.mean()",
        r"returned a tensor of shape \(\); expected a tensor of shape \(11,\), .*return the terms, not their mean",
    ),
    (
        "loss",
        "def loss(inputs):\n    return inputs.logprobs_N[:, None] * inputs.advantages_N",
        r"returned a tensor of shape \(11, 11\)",
    ),
    ("loss", "def loss(inputs):\n    return inputs.answer_N", r"returned a tensor of torch.int64; expected floats"),
    (
        "loss",
        "def loss(inputs):\n    return -inputs.advantages_N",
        "has no gradient; compute it from inputs.logprobs_N",
    ),
    ("loss", "def loss(inputs):\n    return 0 * inputs.logprobs_N", "its gradient is zero for every token"),
    (
        "loss",
        "def loss(inputs):\n    return inputs.logprobs_N.log()",
        r"mine\.py:1: loss returned nan for 11 of 11 tokens; the first one has the log-probability -",
    ),
    (
        "loss",
        "def loss(inputs):\n    x = inputs.logprobs_N\n    return (x - x.detach()).abs().sqrt() + x",
        "its gradient is NaN or infinite, though what it returns is not",
    ),
    (
        "loss",
        "import torch\n\ndef loss(inputs):\n    return inputs.logprobs_N * torch.rand(())",
        "it returns other terms for the same inputs",
    ),
    (
        "loss",
        "def loss(inputs):\n    inputs.advantages_N.mul_(2)\n    return -inputs.logprobs_N * inputs.advantages_N",
        "it changes its inputs in place",
    ),
    (
        "loss",
        "def loss(inputs):\n    A = inputs.advantages_N\n    return -inputs.logprobs_N * (A - A.mean())",
        "change with the other answers of its micro-batch",
    ),
    ("advantage", "def advantage(sessions):\n    return 1.0", r"returned float 1.0 for 8 sessions; expected a list"),
    (
        "advantage",
        "def advantage(sessions):\n    return [each.reward for each in sessions]",
        r"mine\.py:1: advantage returned float 1.0 for session 0, which has 1 turns; expected a list with one number",
    ),
    (
        "advantage",
        "def advantage(sessions):\n    return [[each.reward] * len(each.turns) for each in sessions]",
        "returned None for a turn of session 7; expected a finite number",
    ),
    (
        "advantage",
        "def advantage(sessions):\n    return [[float('nan')] * len(each.turns) for each in sessions]",
        "returned nan for a turn of session 0",
    ),
    (
        "advantage",
        "import random\ndef advantage(sessions):\n    return [["
        "random.random() for _ in each.turns] for each in sessions]",
        "it returns other advantages for the same sessions",
    ),
    (
        "filter",
        "def filter(sessions):\n    return [each for each in sessions if each.reward]",
        r"returned list of length 6 for 8 sessions; expected a list with one entry per session, True or False",
    ),
    ("filter", "def filter(sessions):\n    return [each.reward for each in sessions]", r"returned 1.0 for session 0"),
    ("filter", "def filter(sessions):\n    return sessions[9].id", r"mine\.py:2: IndexError: .* in filter"),
]


@pytest.mark.parametrize(("part", "text", "said"), MISTAKES)
def test_a_mistake_is_an_error_at_the_start_that_says_where_and_what(
    tmp_path: Path, part: str, text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=rf"(?s)trainer.algorithm.{part}: .*{said}"):
        tried(path, **{part: part})


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("mine.py", "names no function: write .FILE.py:NAME."),
        ("mine.txt:loss", "names no function"),
        ("mine.py:not a name", "names no function"),
        ("nowhere.py:loss", "cannot read .*nowhere.py: No such file or directory"),
    ],
)
def test_a_reference_without_a_function_is_refused(
    tmp_path: Path, reference: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[trainer.algorithm]\nloss = "{reference}"\n')
    assert main(["--config", str(config), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "trainer.algorithm.loss: " in told
    with pytest.raises(ConfigurationError, match=said):
        load_settings(config, environment={})


def test_the_command_tries_them_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`base-rl up` and `base-rl train` first run the trainer with `--dry-run`."""
    written(tmp_path, "def loss(inputs):\n    return inputs.logprobs_N.sum()\n")
    config = tmp_path / "run.toml"
    config.write_text('[trainer.algorithm]\nloss = "mine.py:loss"\n')
    assert main(["--config", str(config), "--dry-run"]) == 2
    assert (
        f"trainer.algorithm.loss: {tmp_path}/mine.py:1: loss returned a tensor of shape ()" in capsys.readouterr().err
    )
    written(tmp_path, GOOD)
    assert main(["--config", str(config), "--dry-run"]) == 0
    assert f'"file": "{tmp_path}/mine.py"' in capsys.readouterr().out


def test_a_relative_file_is_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a run's own section; on the command line and in the environment, the path is relative to the
    working directory."""
    there = tmp_path / "there"
    there.mkdir()
    written(there, GOOD)
    config = there / "run.toml"
    config.write_text(
        '[trainer.algorithm]\nloss = "mine.py:loss"\n'
        '[trainer.runs.one.algorithm]\nadvantage = "./mine.py:advantage"\n'
    )
    monkeypatch.chdir(tmp_path)
    settings = load_settings(config, {"run": "one"}, {}).algorithm
    assert settings.loss is not None
    assert settings.advantage is not None
    assert settings.loss.file == settings.advantage.file == str(there / "mine.py")
    assert settings.loss.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    named = load_settings(None, None, {"BASE_RL_TRAINER__ALGORITHM__LOSS": "there/mine.py:loss"}).algorithm.loss
    assert named is not None
    assert named.file == str(there / "mine.py")


def test_the_hash_of_the_file_is_part_of_the_mathematics_and_its_place_is_not(tmp_path: Path) -> None:
    hashes, records = [], []
    for folder, text in (("a", GOOD), ("b", GOOD), ("c", f"{GOOD}\n# and more\n")):
        (tmp_path / folder).mkdir()
        path = written(tmp_path / folder, text)
        settings = load_settings(None, {"algorithm": {"loss": f"{path}:loss"}}, {})
        hashes.append(settings.config_hash())
        records.append(as_json(resolve(settings.algorithm)))
        assert settings.mathematics()["algorithm"]["loss"]["file"] == "mine.py"
    assert hashes[0] == hashes[1] != hashes[2]
    assert records[0] == records[1] != records[2]
    assert from_json(records[0]).user_functions["loss"].sha256 == hashlib.sha256(GOOD.encode()).hexdigest()


def test_a_file_that_changed_since_it_was_configured_is_not_executed(tmp_path: Path) -> None:
    """The file that runs is the one that the record names, even if the file is edited while the trainer starts."""
    path = written(tmp_path, GOOD)
    settings = AlgorithmSettings.model_validate({"loss": f"{path}:loss"})
    marker = tmp_path / "executed"
    path.write_text(f"open({str(marker)!r}, 'w').close()\n{GOOD}")
    with pytest.raises(ConfigurationError, match=r"has another content than the configuration names: its SHA-256 is"):
        try_functions(resolve(settings))
    assert not marker.exists()


def test_a_failure_in_training_names_the_token(tmp_path: Path) -> None:
    text = "def loss(inputs):\n    return inputs.logprobs_N / (inputs.advantages_N - 7)\n"
    settings = AlgorithmSettings.model_validate({"loss": f"{written(tmp_path, text)}:loss"})
    assert settings.loss is not None
    inputs = made_up_tokens((1, 1), has_reference=False)
    inputs.advantages_N[1] = 7.0
    with pytest.raises(UserFunctionFailed, match=r"returned -inf for 1 of 2 tokens; .* the advantage 7$"):
        call_loss(settings.loss, inputs)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"loss": "loss", "surrogate": "gated"}, "surrogate: loss is a function of your own"),
        ({"loss": "loss", "clip_low": 0.1}, "clip_low: loss is a function of your own"),
        ({"advantage": "advantage", "baseline": "none"}, "baseline: advantage is a function of your own"),
        ({"advantage": "advantage", "turn_discount": 0.9}, "turn_discount: advantage is a function of your own"),
        ({"preset": "ppo", "advantage": "advantage"}, "advantage: with baseline = critic the critic makes"),
        ({"preset": "distillation", "loss": "loss"}, "loss: rewards teach nothing"),
        ({"preset": "distillation", "advantage": "advantage"}, "advantage: rewards teach nothing"),
    ],
)
def test_parts_that_a_function_makes_useless_are_refused(tmp_path: Path, parts: dict[str, Any], said: str) -> None:
    path = written(tmp_path, GOOD)
    given = {key: f"{path}:{value}" if value in ("loss", "advantage") else value for key, value in parts.items()}
    with pytest.raises(ConfigurationError, match=f"trainer.algorithm.{said}"):
        resolve(AlgorithmSettings.model_validate(given))
