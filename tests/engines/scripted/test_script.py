"""A script is read completely, and every error names its file, rule and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.scripted.script import BUILT_IN, Failure, Match, Pace, fill, fill_all, read_script
from proxy.settings import ConfigurationError


def written(folder: Path, text: str, name: str = "script.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    rules = """
        [defaults]
        delay_ms = 5
        [[rule]]
        match = { role = "user", contains = "x", turn = 2 }
        tool_calls = [{ name = "f", arguments = { a = 1 } }]
        times = 3
        [[rule]]
        error = { status = 429, after_tokens = 2 }
        text = "some words"
    """
    value = {
        "defaults": {"delay_ms": 5},
        "rule": [
            {
                "match": {"role": "user", "contains": "x", "turn": 2},
                "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
                "times": 3,
            },
            {"error": {"status": 429, "after_tokens": 2}, "text": "some words"},
        ],
    }
    script = read_script(written(tmp_path, rules))
    assert script == read_script(written(tmp_path, json.dumps(value), "script.json"))
    assert script.defaults == Pace(delay_ms=5)
    assert script.rule[0].match == Match(role="user", contains="x", turn=2)
    assert script.rule[1].error == Failure(status=429, after_tokens=2)


def test_the_built_in_script_is_sound() -> None:
    assert read_script(BUILT_IN).rule[-1].match.anything


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no rule"),
        ("rule = 3", "there is no rule"),
        ("[[rule]", "script.toml: "),
        ("[[rule]]\ntext = 'a'\n[[rules]]\n", "rules"),
        ("[[rule]]\n", "rule 1: it has no answer"),
        ("[[rule]]\ntext = 'a'\ncolour = 'red'", "rule 1: .*colour"),
        ("[[rule]]\ntext = 4", "rule 1: text: Expected `str"),
        ("[[rule]]\ntext = 'a'\njson = {}", "rule 1: json and text: only one"),
        ("[[rule]]\nraw = 'a'\nreasoning = 'b'", "rule 1: raw: "),
        ("[[rule]]\ntext = 'a'\nmatch = { role = 'robot' }", "rule 1: match.role: "),
        ("[[rule]]\ntext = 'a'\nmatch = { contains = 'a', regexp = 'a' }", "rule 1: match: .*regexp"),
        ("[[rule]]\ntext = 'a'\nmatch = { regex = '(' }", "rule 1: match.regex: "),
        ("[[rule]]\ntext = '{2}'\nmatch = { regex = '(a)' }", r"rule 1: text: \{2\}, but match.regex has 1 groups"),
        ("[[rule]]\ntext = 'a'\nmatch = { turn = 0 }", "rule 1: match.turn: "),
        ("[[rule]]\ntext = 'a'\ntimes = 0", "rule 1: times: "),
        ("[[rule]]\ntext = 'a'\ndelay_ms = -1", "rule 1: delay_ms: "),
        ("[[rule]]\ntext = 'a'\nfinish = 'abort'", "rule 1: finish: "),
        ("[[rule]]\nerror = { status = 200 }", "rule 1: error.status: "),
        ("[[rule]]\nerror = { after_tokens = 3 }", "rule 1: error.after_tokens: "),
        ("[[rule]]\ntool_calls = [{ name = '' }]", r"rule 1: tool_calls\[0\].name: "),
        ("[[rule]]\ntool_calls = [{ name = 'f', arguments = '[1]' }]", r"rule 1: tool_calls\[0\].arguments: is no"),
        ("[[rule]]\ntool_calls = [{ name = 'f', arguments = '{1' }]", r"rule 1: tool_calls\[0\].arguments: "),
        ("[[rule]]\ntool_calls = [{ name = 'f', arguments = { a = nan } }]", r"rule 1: tool_calls\[0\].arguments: "),
        ("[[rule]]\njson = { day = 1979-05-27 }", "rule 1: json: .*dates"),
        ("[[rule]]\ntext = 'a'\n[[rule]]\ntext = 'b'", "rule 2 is never reached: rule 1 answers everything"),
        ("defaults = { delay = 3 }\n[[rule]]\ntext = 'a'", "defaults: .*delay"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as raised:
        read_script(written(tmp_path, text))
    assert "script.toml" in str(raised.value)


def test_all_faulty_rules_are_named_at_once(tmp_path: Path) -> None:
    text = "[[rule]]\nmatch = { contains = 'x' }\n[[rule]]\nmatch = { contains = 'y' }\ntext = 1"
    with pytest.raises(ConfigurationError) as raised:
        read_script(written(tmp_path, text))
    assert [line.split(": ")[1] for line in str(raised.value).splitlines()] == ["rule 1", "rule 2"]


def test_a_script_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the script"):
        read_script(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bytes\.toml"):
        read_script(tmp_path / "bytes.toml")


@given(st.text(), st.dictionaries(st.sampled_from(["message", "1", "city"]), st.text()))
def test_only_known_placeholders_are_filled_in(text: str, values: dict[str, str]) -> None:
    assert fill(text.replace("{", ""), values) == text.replace("{", "")
    assert fill("{unknown} {}", values) == "{unknown} {}"
    for name, value in values.items():
        assert fill(f"<{{{name}}}>", values) == f"<{value}>"
        assert fill_all({"k": [f"{{{name}}}", 1, None]}, values) == {"k": [value, 1, None]}
