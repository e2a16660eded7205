from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.redaction.rules import found_in, load_rules
from proxy.redaction.text import TextRedactor
from proxy.settings import ConfigurationError, RedactionSettings

ALL = ("email", "phone", "credit_card", "iban", "ip", "secret")
ANALYZERS = "tests.proxy.redaction.analyzer"


def redactor(**settings: Any) -> TextRedactor:
    return TextRedactor(load_rules(RedactionSettings.model_validate(settings)))


@pytest.mark.parametrize(
    ("rule", "text", "redacted"),
    [
        ("email", "write to ada.l+x@mail.example.org, now", "write to [email], now"),
        ("email", "a@b is none", "a@b is none"),
        ("phone", "call +44 20 7946 0958 or (030) 1234-5678", "call [phone] or [phone]"),
        ("phone", "in 2024 there were 12 345 678 of 99", "in 2024 there were 12 345 678 of 99"),
        ("credit_card", "4111 1111 1111 1111", "[credit_card]"),
        ("credit_card", "4111 1111 1111 1112", "4111 1111 1111 1112"),
        ("iban", "to DE89 3704 0044 0532 0130 00.", "to [iban]."),
        ("iban", "to DE88 3704 0044 0532 0130 00.", "to DE88 3704 0044 0532 0130 00."),
        ("ip", "from 192.168.0.1 and 2001:db8::1 at 12:30:45", "from [ip] and [ip] at 12:30:45"),
        ("ip", "std::vector and 999.1.1.1", "std::vector and 999.1.1.1"),
        ("secret", "key sk-abcdefghijklmnop1234 and ghp_" + "a" * 36, "key [secret] and [secret]"),
        ("secret", 'password: "hunter2hunter2"', '[secret]"'),
    ],
)
def test_built_in_rules(rule: str, text: str, redacted: str) -> None:
    assert redactor(rules=[rule]).text(text) == redacted


def test_configured_patterns_and_analyzers() -> None:
    own = redactor(patterns={"ticket": r"T-\d+"}, analyzers=[f"{ANALYZERS}:people", f"{ANALYZERS}:colours"])
    assert own.text("T-17: Quirinius is red") == "[ticket]: [people] is [colours]"


def test_a_text_that_a_rule_cannot_search_is_not_stored() -> None:
    assert redactor(analyzers=[f"{ANALYZERS}:broken"]).text("anything") == "[broken]"
    slow = redactor(patterns={"slow": r"(a|aa)+$"})
    assert slow.text("a" * 200 + "b") == "[slow]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patterns": {"x": "("}}, r"run.redaction.patterns.x is not a valid regular expression"),
        ({"patterns": {"x": "a*"}}, r"matches the empty text"),
        ({"analyzers": ["nowhere"]}, r"must be written as module:function"),
        ({"analyzers": ["nowhere.at:all"]}, r"cannot be imported"),
        ({"analyzers": [f"{ANALYZERS}:Missing"]}, r"cannot be imported"),
        ({"analyzers": ["sys:path"]}, r"is not a function"),
    ],
)
def test_rules_that_cannot_be_used_are_refused_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        redactor(**settings)


def test_json_is_redacted_except_the_ids_that_connect_messages() -> None:
    value = {
        "id": "a@b.org",
        "content": [{"type": "text", "text": "mail a@b.org"}],
        "arguments": '{"to": "a\\u0040b.org", "n": 1}',
        "a@b.org": 3,
    }
    assert redactor(rules=["email"]).value(value) == {
        "id": "a@b.org",
        "content": [{"type": "text", "text": "mail [email]"}],
        "arguments": '{"to": "[email]", "n": 1}',
        "[email]": 3,
    }


_PIECES = st.sampled_from(
    [
        "a@b.org",
        "@",
        ".org",
        "x",
        " ",
        "+44 20 7946 0958",
        "4111 1111 1111 1111",
        "1",
        "12",
        "-",
        "10.0.0.1",
        "\n",
        "[",
        "]",
    ]
)


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_after_redaction_the_rules_find_nothing_outside_the_marks(text: str) -> None:
    own = redactor(rules=ALL)
    redacted = own.text(text)
    for one in found_in(redacted, own.rules):
        assert redacted[one.start : one.end].startswith("["), redacted
    if not own.found(text):
        assert own.text(text) == text
        assert own.value([text])[0] is text
