from __future__ import annotations

from pathlib import Path

import pytest

from proxy.settings import ConfigurationError, as_environment, load_settings

FILE = """
[providers.local]
base_url = "http://127.0.0.1:8000/v1"
prompt_price = 0.5
completion_price = 2

[run.judges.taste]
model = "local/critic"
rubric = "Is it right?"

[runs.Shop.judges.taste]
model = "local/org/other"
rubric = "Is it cheap?"
"""


def test_judges_and_providers_reach_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "base-rl.toml"
    file.write_text(FILE)
    monkeypatch.setenv("BASE_RL_PROVIDERS__LOCAL__API_KEY", "sk-secret")
    settings = load_settings(file)
    (shop,) = settings.runs.values()
    assert (shop.judges["taste"].provider_model, settings.run.judges["taste"].rubric) == ("org/other", "Is it cheap?")
    monkeypatch.delenv("BASE_RL_PROVIDERS__LOCAL__API_KEY")
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    again = load_settings(None)
    assert (again.providers, again.run.judges, again.runs) == (settings.providers, settings.run.judges, settings.runs)
    key = again.providers["local"].api_key
    assert key is not None
    assert key.get_secret_value() == "sk-secret"
    assert "sk-secret" not in repr(again)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('model = "elsewhere/critic"', r"\[providers.elsewhere\]"),
        ('model = "critic"', "judges.taste.model"),
        ('model = "local/critic"\nlow = 1', "low is 1.0, not below high"),
        ('model = "local/critic"\nvotes = 0', "judges.taste.votes"),
    ],
)
def test_wrong_judges_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "base-rl.toml"
    provider = '[providers.local]\nbase_url = "http://127.0.0.1:8000/v1"\n'
    file.write_text(f'{provider}[run.judges.taste]\nrubric = "right"\n{line}\n')
    with pytest.raises(ConfigurationError, match=message):
        load_settings(file)
