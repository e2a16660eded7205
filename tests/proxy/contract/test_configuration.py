"""Proxy and trainer read file and environment in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.configuration import (
    UnreadableConfiguration,
    environment_values,
    merge,
    parse_value,
    read_config_file,
)

TABLES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=6
)
TABLE = st.dictionaries(st.sampled_from("abc"), TABLES, max_size=3)


def test_a_section_of_the_environment_is_a_nested_mapping() -> None:
    environment = {
        "BASE_RL_RUN__NAME": "coder",
        "base_rl_run__rewards__combine": "mean",
        "BASE_RL_RUN__REWARDS__ORDER": '["a"]',
        "BASE_RL_RUNS__NAME": "another section",
        "PATH": "/bin",
    }
    assert environment_values(environment, "run") == {"name": "coder", "rewards": {"combine": "mean", "order": ["a"]}}


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_variable_may_name_a_file_with_the_value(tmp_path: Path, end: str) -> None:
    secret, order = tmp_path / "secret", tmp_path / "order"
    secret.write_bytes(f" hush= {end}".encode())
    order.write_bytes(f'["a"]{end}'.encode())
    environment = {"BASE_RL_DATABASE__PASSWORD_FILE": str(secret), "base_rl_database__of__order_file": str(order)}
    assert environment_values(environment, "database") == {"password": " hush= ", "of": {"order": ["a"]}}


def test_the_variable_itself_wins_over_the_one_that_names_a_file() -> None:
    environment = {"BASE_RL_RUN__NAME": "coder", "BASE_RL_RUN__NAME_FILE": "/missing"}
    assert environment_values(environment, "run") == {"name": "coder"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read .*secret: No such file"),
        (b"", "secret is empty; write the value into it"),
        (b"\r\n", "secret is empty"),
        (b"\xff", "secret is not UTF-8"),
        (b"a" * 70_000, "secret has more than 65536 bytes"),
        ("a directory", "cannot read .*secret: Is a directory"),
    ],
)
def test_a_file_without_a_value_is_refused_with_its_variable(
    tmp_path: Path, content: bytes | str | None, says: str
) -> None:
    file = tmp_path / "secret"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.mkdir()
    with pytest.raises(UnreadableConfiguration, match=f"^BASE_RL_JOBS__BROKER_PASSWORD_FILE: .*{says}"):
        environment_values({"BASE_RL_JOBS__BROKER_PASSWORD_FILE": str(file)}, "jobs")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, who may read every file.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableConfiguration, match=r"^BASE_RL_RUN__NAME_FILE: cannot read /x: Permission denied"):
        environment_values({"BASE_RL_RUN__NAME_FILE": "/x"}, "run")


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("[1]", [1]), ('{"a": 1}', {"a": 1}), ("[a-z]", "[a-z]"), ("1", "1"), ("", "")],
)
def test_lists_tables_and_null_are_json(text: str, value: object) -> None:
    assert parse_value(text) == value


def leaves(table: dict[str, Any], *path: str) -> dict[tuple[str, ...], object]:
    found: dict[tuple[str, ...], object] = {}
    for key, value in table.items():
        found |= leaves(value, *path, key) if isinstance(value, dict) else {(*path, key): value}
    return found


@given(TABLE, TABLE)
def test_every_value_of_the_upper_layer_wins(under: dict[str, Any], over: dict[str, Any]) -> None:
    merged = leaves(merge(under, over))
    assert leaves(over).items() <= merged.items()
    assert merged.items() <= (leaves(under) | leaves(over)).items()
    assert merge(under, {}) == merge({}, under) == merge(under, under) == under


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UnreadableConfiguration, match=r"run\.toml is not valid TOML: it is not UTF-8"):
        read_config_file(tmp_path / "run.toml")
