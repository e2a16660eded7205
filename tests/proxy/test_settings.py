"""Settings: precedence, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from proxy.contract.reward import NameRule, RewardRules
from proxy.jobs.broker import celery_app
from proxy.settings import ConfigurationError, SamplingMode, as_environment, load_settings


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, '[server]\nport = 1\nhost = "file"\n[run]\nname = "file"\nmax_new_tokens = 7\n')
    monkeypatch.setenv("BASE_RL_SERVER__PORT", "2")
    monkeypatch.setenv("BASE_RL_RUN__NAME", "environment")
    settings = load_settings(file, {"run": {"name": "command-line"}})
    assert settings.run.name == "command-line"
    assert settings.server.port == 2
    assert settings.server.host == "file"
    assert settings.run.max_new_tokens == 7
    assert settings.run.sampling.mode is SamplingMode.RAISE_GREEDY


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[servr]\nport = 1\n", "servr"),
        ("[server]\nprot = 1\n", "server.prot"),
        ("[server]\nport = 'many'\n", "server.port"),
        ("[run]\nname = 'no spaces please'\n", "run.name"),
        ("[run.sampling]\nmode = 'wild'\n", "run.sampling.mode"),
        ("[run]\nlease_seconds = 0\n", "run.lease_seconds"),
        ("[run.limits]\ncalls_per_minute = 0\n", "run.limits.calls_per_minute"),
        ("[run.limits]\nburst_seconds = 61\n", "run.limits.burst_seconds"),
        ("[outbound]\nallow = ['10.0.0.300']\n", "outbound.allow"),
        ("[outbound]\nallow = ['10.0.0.1/8']\n", "outbound.allow"),
        ("[outbound]\nallow = ['https://hooks.internal']\n", "outbound.allow"),
    ],
)
def test_a_wrong_key_in_the_file_is_named(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        load_settings(write(tmp_path, text))


@pytest.mark.parametrize("name", ["BASE_RL_SERVR__PORT", "BASE_RL_SERVER__PROT"])
def test_a_wrong_key_in_the_environment_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=name.rpartition("__")[2].lower() + "|" + name):
        load_settings()


def test_a_wrong_command_line_value_is_named() -> None:
    with pytest.raises(ConfigurationError, match="port"):
        load_settings(None, {"server": {"port": 70000}})


def test_a_missing_or_broken_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_settings(write(tmp_path, "[server\n"))


def test_the_trainers_section_is_carried_past(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "[trainer]\nanything = 1\n")).trainer == {"anything": 1}


def test_the_database_is_in_the_data_directory_unless_named(tmp_path: Path) -> None:
    settings = load_settings(None, {"server": {"data_dir": tmp_path}})
    assert settings.database_url == f"sqlite:///{tmp_path / 'base-rl.sqlite3'}"
    other = load_settings(None, {"database": {"url": "postgresql+psycopg://host/name"}})
    assert other.database_url == "postgresql+psycopg://host/name"


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("sqlite:////var/store.sqlite3", "sqlite:////var/store.sqlite3"),
        ("sqlite+aiosqlite:////var/store.sqlite3", "sqlite:////var/store.sqlite3"),
        ("postgresql://me:pw@db:5432/store", "postgresql+psycopg://me:pw@db:5432/store"),
        ("postgresql:///store?host=/run/postgresql", "postgresql+psycopg:///store?host=/run/postgresql"),
    ],
)
def test_a_database_is_named_without_its_driver(url: str, used: str) -> None:
    assert load_settings(None, {"database": {"url": url}}).database_url == used


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:hush@db/store",
        "postgresql+asyncpg://me:hush@db/store",
        "postgresql+psycopg2://me:hush@db/store",
        "me:hush@db/store",
        "postgresql://me:hush@db",
        "postgresql://me:hush@db:port/store",
    ],
)
def test_an_unsupported_database_url_is_refused_with_advice_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"database\.url.*postgresql://user:password@host") as refused:
        load_settings(None, {"database": {"url": url}})
    assert "hush" not in str(refused.value)


def test_passwords_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DATABASE__PASSWORD", "JOBS__BROKER_PASSWORD", "BOOTSTRAP__ADMIN_KEY"):
        (tmp_path / variable).write_text(f"p@s/w:d %{variable}\n")
        monkeypatch.setenv(f"BASE_RL_{variable}_FILE", str(tmp_path / variable))
    given = {"database": {"url": "postgresql://me@db:5432/store"}, "jobs": {"broker": "rediss://redis:6379/1"}}
    settings = load_settings(None, given)
    assert settings.bootstrap.admin_key is not None
    assert settings.bootstrap.admin_key.get_secret_value() == "p@s/w:d %BOOTSTRAP__ADMIN_KEY"
    store = make_url(settings.database_url)
    assert (store.username, store.password, store.host) == ("me", "p@s/w:d %DATABASE__PASSWORD", "db")
    assert settings.jobs.full_broker is not None
    assert celery_app(settings.jobs.full_broker, "base-rl").connection().password == "p@s/w:d %JOBS__BROKER_PASSWORD"
    shown = settings.model_dump_json() + repr(settings)
    assert "p@s" not in shown
    assert "p%40s" not in shown
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings(None).database_url == settings.database_url
    assert load_settings(None).jobs == settings.jobs


def test_a_file_that_is_missing_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_RL_RUNS__SHOP__MODEL_FILE", "/missing")
    with pytest.raises(ConfigurationError, match=r"^BASE_RL_RUNS__SHOP__MODEL_FILE: cannot read /missing: No such"):
        load_settings()


@pytest.mark.parametrize(
    ("section", "key", "url"),
    [
        ("database", "password", None),
        ("database", "password", "sqlite:////store.sqlite3"),
        ("database", "password", "postgresql://db/store"),
        ("database", "password", "postgresql://me:hush@db/store"),
        ("database", "password", "postgresql://me@db/store?password=hush"),
        ("jobs", "broker_password", None),
        ("jobs", "broker_password", "redis://:hush@redis/0"),
        ("jobs", "broker_password", "redis://redis/0?password=hush"),
    ],
)
def test_a_password_without_effect_is_refused(section: str, key: str, url: str | None) -> None:
    named = {"database": "url", "jobs": "broker"}[section]
    given = {key: "other"} | ({named: url} if url is not None else {})
    with pytest.raises(ConfigurationError, match=f"^{section}: {key}: it belongs to a {named} ") as refused:
        load_settings(None, {section: given})
    assert "hush" not in str(refused.value)


def test_another_process_gets_the_same_settings_in_any_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "server": {"port": 1234, "data_dir": tmp_path, "public_url": "https://rl.example"},
        "run": {
            "name": "mine",
            "reward_weights": {"format": 0.5},
            "rewards": {"combine": "first_of", "order": ["tests", "judge"], "sources": "mean", "high": 2.0},
            "sampling": {"mode": "respect"},
            "lease_seconds": 4.0,
            "limits": {"calls_per_minute": 600, "max_waiting": 0},
        },
        "engine": {"url": "http://127.0.0.1:1", "max_concurrency": 3},
    }
    settings = load_settings(None, given)
    monkeypatch.setenv("BASE_RL_RUN__NAME", "anothers")
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_the_rules_of_rewards_are_read_from_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [run.reward_weights]
        style = 0.1
        [run.rewards]
        combine = "first_of"
        order = ["tests", "judge"]
        low = -1
        """,
    )
    assert load_settings(file).run.reward_rules == RewardRules(
        weights={"style": 0.1}, combine=NameRule.FIRST_OF, order=("tests", "judge"), low=-1.0
    )
    assert load_settings(None).run.reward_rules == RewardRules()


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"combine": "first_of"}, r"run\.rewards: order and combine"),
        ({"order": ["tests"]}, r"run\.rewards: order and combine"),
        ({"combine": "first_of", "order": ["a", "a"]}, r"run\.rewards: order has a name twice"),
        ({"low": 1, "high": 0}, r"run\.rewards: low is 1\.0, above high"),
        ({"low": float("nan")}, r"run\.rewards\.low: "),
        ({"combine": "median"}, r"run\.rewards\.combine: .*'weighted_sum'"),
        ({"sources": "max"}, r"run\.rewards\.sources: "),
    ],
)
def test_rules_that_make_no_sense_are_refused(rewards: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_settings(None, {"run": {"rewards": rewards}})
    with pytest.raises(ConfigurationError, match=r"run\.reward_weights\.style: "):
        load_settings(None, {"run": {"reward_weights": {"style": float("inf")}}})


@pytest.mark.parametrize("kind", ["nonsense", "http://", "127.0.0.1:30000", "ftp://host", ""])
def test_an_engine_is_known_by_name_or_url(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.kind: .*embedded, sglang, scripted, or the URL"):
        load_settings(None, {"engine": {"kind": kind}})


@pytest.mark.parametrize("kind", ["embedded", "sglang", "scripted", "http://127.0.0.1:30000", "https://host/sglang"])
def test_engines_that_can_be_named(kind: str) -> None:
    assert load_settings(None, {"engine": {"kind": kind}}).engine.kind == kind


def test_only_the_scripted_engine_has_a_script() -> None:
    settings = load_settings(None, {"engine": {"kind": "scripted", "script": "my.toml"}})
    assert settings.engine.script == Path("my.toml")
    with pytest.raises(ConfigurationError, match=r"^engine\.script: only the scripted engine"):
        load_settings(None, {"engine": {"script": "my.toml"}})


def test_errors_name_the_whole_key(tmp_path: Path) -> None:
    file = tmp_path / "base-rl.toml"
    file.write_text('engine = 3\n[run]\nnmae = "x"\n')
    with pytest.raises(ConfigurationError) as refused:
        load_settings(file)
    assert set(str(refused.value).splitlines()) == {
        "engine: write it as a section, [engine]",
        "run.nmae: there is no such key",
    }
    with pytest.raises(ConfigurationError, match=r"^run\.name: "):
        load_settings(None, {"run": {"name": "my agent"}})


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        ("reasoning_parser", ("auto", "none", "think")),
        ("images", ("refuse", "name")),
    ],
)
def test_an_unknown_parser_is_refused_with_those_that_there_are(key: str, accepted: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=rf"^run\.{key}: ") as refused:
        load_settings(None, {"run": {key: "xml"}})
    assert all(f"'{name}'" in str(refused.value) for name in accepted)
    for name in accepted:
        assert getattr(load_settings(None, {"run": {key: name}}).run, key) == name


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "base-rl.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        load_settings(file)


RUNS = """
[run]
model = "base"
max_new_tokens = 7
reward_weights = {style = 0.5, tests = 2}
[runs.Shop]
max_new_tokens = 9
[runs.Shop.reward_weights]
style = 0.1
[runs.support]
weights = "adapter"
trainer = {batch = {trajectories = 4}}
"""


def test_a_table_of_a_run_inherits_what_it_does_not_give(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, RUNS))
    shop, support = settings.declared_runs
    assert settings.run == shop  # [run] has no name, so it is no run itself
    assert (shop.name, shop.model, shop.max_new_tokens, shop.weights) == ("Shop", "base", 9, "full")
    assert shop.reward_weights == {"style": 0.1, "tests": 2}
    assert (support.name, support.max_new_tokens, support.weights) == ("support", 7, "adapter")
    assert support.trainer == {"batch": {"trajectories": 4}}
    named = load_settings(write(tmp_path, RUNS), {"run": {"name": "main"}})
    assert [run.name for run in named.declared_runs] == ["main", "Shop", "support"]
    same = load_settings(write(tmp_path, RUNS), {"run": {"name": "support"}})
    assert [run.name for run in same.declared_runs] == ["support", "Shop"]
    assert same.run.weights == "adapter"


def test_the_environment_sets_keys_of_single_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_RL_RUNS", '{"my-run": {"max_new_tokens": 1}, "Shop": {"max_new_tokens": 2}}')
    monkeypatch.setenv("BASE_RL_RUNS__SHOP__LEASE_SECONDS", "3")
    settings = load_settings(write(tmp_path, RUNS))
    assert [run.name for run in settings.declared_runs] == ["Shop", "support", "my-run"]
    assert (settings.run.max_new_tokens, settings.run.lease_seconds) == (2, 3.0)
    assert settings.runs["my-run"].model == "base"


def test_several_runs_reach_another_process_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(write(tmp_path, RUNS))
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings().declared_runs == settings.declared_runs


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[run]\nlease_seconds = 0\n[runs.a]\n[runs.b]\n", {"run.lease_seconds"}),
        ("[runs.a]\nlease_seconds = 0\n[runs.b]\n", {"runs.a.lease_seconds"}),
        (
            "[run]\nname = 'c'\n[runs.a]\nprot = 1\n[runs.b.limits]\nburst = 1\n",
            {"runs.a.prot", "runs.b.limits.burst"},
        ),
        ("[runs.'no spaces']\n", {"runs.no spaces.name"}),
        ("[runs]\na = 3\n", {"runs.a"}),
        ("runs = 3\n", {"runs"}),
        ("[runs.a]\nname = 'b'\n", {"runs.a.name"}),
        ("[runs.a]\ntrainer = 3\n", {"runs.a.trainer"}),
        ("[runs.a]\nweights = 'half'\n", {"runs.a.weights"}),
    ],
)
def test_a_wrong_key_of_one_run_is_reported_once_where_it_was_given(
    tmp_path: Path, text: str, lines: set[str]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(write(tmp_path, text))
    assert {line.partition(": ")[0] for line in str(refused.value).splitlines()} == lines


@pytest.mark.parametrize("text", ["{", "[]", '"shop"'])
def test_tables_of_runs_in_the_environment_are_a_json_object(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_RL_RUNS", text)
    with pytest.raises(ConfigurationError, match="BASE_RL_RUNS: write a JSON object"):
        load_settings()
