"""The ten rules of reading a request: pure functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import is_session_id
from proxy.errors import InvalidRequest
from proxy.sessions.identification import (
    AttributedBy,
    Name,
    SessionHints,
    claude_code_session,
    session_headers,
    session_hints,
    trace_id,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HASH = "5dd07c33da27e6d2968d94ea20bf47a7b090b6b158b82328d54da2909a108e84"
UUID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"
CLAUDE_CODE = json.dumps({"device_id": HASH, "account_uuid": "", "session_id": UUID})
CLAUDE_CODE_OLD = f"user_{HASH}_account__session_{UUID}"

EVERYTHING: list[tuple[dict[str, str], dict[str, Any], AttributedBy, str]] = [
    ({"x-base-rl-session": "own"}, {}, AttributedBy.HEADER, "own"),
    ({"session-id": "codex"}, {}, AttributedBy.AGENT_HEADER, "codex"),
    ({"session_id": "old codex"}, {}, AttributedBy.AGENT_HEADER, "old codex"),
    ({"thread-id": "thread"}, {}, AttributedBy.AGENT_HEADER, "thread"),
    ({"x-session-id": "ses_7f3KqZ"}, {}, AttributedBy.AGENT_HEADER, "ses_7f3KqZ"),
    ({"x-session-affinity": "affinity"}, {}, AttributedBy.AGENT_HEADER, "affinity"),
    ({"x-opencode-session": "zen"}, {}, AttributedBy.AGENT_HEADER, "zen"),
    ({"x-claude-code-session-id": UUID}, {}, AttributedBy.AGENT_HEADER, UUID),
    ({}, {"prompt_cache_key": "cache"}, AttributedBy.PROMPT_CACHE_KEY, "cache"),
    ({}, {"metadata": {"session_id": "meta"}}, AttributedBy.METADATA, "meta"),
    ({}, {"metadata": {"user_id": CLAUDE_CODE}}, AttributedBy.METADATA, UUID),
    ({}, {"user": CLAUDE_CODE_OLD}, AttributedBy.METADATA, UUID),
    ({"openai-project": "proj_1"}, {}, AttributedBy.PROJECT, "proj_1"),
]


def named(headers: dict[str, str], body: dict[str, Any]) -> Name | None:
    return session_hints(path=None, headers=headers, body=body).named


@pytest.mark.parametrize(("headers", "body", "by", "text"), EVERYTHING)
def test_every_rule_finds_its_name(
    headers: dict[str, str], body: dict[str, Any], by: AttributedBy, text: str
) -> None:
    assert named(headers, body) == Name(by, text)


@pytest.mark.parametrize("first", range(len(EVERYTHING)))
def test_the_first_that_applies_decides(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for others, fields, _, _ in reversed(EVERYTHING[first:]):
        headers |= others
        metadata = {**body.get("metadata", {}), **fields.get("metadata", {})}
        body |= {**fields, "metadata": metadata}
    _, _, by, text = EVERYTHING[first]
    assert named(headers, body) == Name(by, text)


@pytest.mark.parametrize("value", ["", "   ", "x" * 201, "a\nb", "\x00", "\ud800", None, True, 1.5, [], {}, ["x"]])
@pytest.mark.parametrize("field", ["prompt_cache_key", "user", "session_id", "user_id"])
def test_a_foreign_value_that_is_not_a_name_is_ignored(field: str, value: Any) -> None:
    body = {field: value} if field in ("prompt_cache_key", "user") else {"metadata": {field: value}}
    assert named({}, body) is None
    assert named({"openai-project": "proj_1"}, body) == Name(AttributedBy.PROJECT, "proj_1")


@pytest.mark.parametrize("metadata", [None, [], "text", 3, {}])
def test_metadata_may_be_anything(metadata: Any) -> None:
    assert named({}, {"metadata": metadata, "prompt_cache_key": "c"}) == Name(AttributedBy.PROMPT_CACHE_KEY, "c")


@pytest.mark.parametrize("body", [{"user": "alice"}, {"metadata": {"user_id": "bob"}}, {"user": 17}])
def test_a_user_names_no_session(body: dict[str, Any]) -> None:
    hints = session_hints(path=None, headers={}, body=body)
    assert (hints.named, hints.name) == (None, None)


def test_a_trace_is_distinguished_from_names() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "openai-project": "proj_1"}
    hints = session_hints(path=None, headers=headers, body={})
    assert (hints.trace, hints.named) == (TRACE, Name(AttributedBy.PROJECT, "proj_1"))


def test_whole_numbers_and_surrounding_space() -> None:
    assert named({}, {"metadata": {"session_id": 17}}) == Name(AttributedBy.METADATA, "17")
    assert named({}, {"metadata": {"session_id": 10**500}}) is None
    assert named({"session-id": " a "}, {}) == Name(AttributedBy.AGENT_HEADER, "a")


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\0b", "\ud800"])
def test_a_wrong_name_of_our_own_is_an_error_that_names_it(name: str) -> None:
    for given_by, param in (
        ({"path": name, "headers": {}}, "session_id"),
        ({"path": None, "headers": {"x-base-rl-session": name}}, "X-Base-RL-Session"),
        ({"path": None, "headers": {"x-base-rl-group": name}}, "X-Base-RL-Group"),
    ):
        with pytest.raises(InvalidRequest) as error:
            session_hints(body={}, **given_by)
        assert error.value.param == param


def test_the_group_is_the_headers_before_the_metadatas() -> None:
    def group(headers: dict[str, str], metadata: Any) -> str | None:
        return session_hints(path=None, headers=headers, body={"metadata": metadata}).group

    assert group({"x-base-rl-group": "h"}, {"group": "m"}) == "h"
    assert group({}, {"group": "m"}) == "m"
    assert group({}, {"group": "a\nb"}) is None
    assert group({}, None) is None


@pytest.mark.parametrize(
    "value",
    [
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
        "garbage",
        "",
    ],
)
def test_invalid_traceparents_are_ignored(value: str) -> None:
    assert trace_id(value) is None
    assert session_hints(path=None, headers={"traceparent": value}, body={}).trace is None


def test_later_versions_of_traceparent_may_have_more_fields() -> None:
    assert trace_id(f"cc-{TRACE}-{PARENT}-01-what-the-future-brings") == TRACE
    assert trace_id(f"00-{TRACE}-{PARENT}-01") == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "alice",
        "{",
        "[]",
        '{"session_id": 3}',
        '{"device_id": "d"}',
        '"text"',
        f"user_{HASH}",
        f"user_{HASH}_session_{UUID}",
        f"user_{HASH}_account__session_short",
        None,
        {"session_id": UUID},
        "{" * 1900,
        '{"session_id": "' + "x" * 2000 + '"}',
    ],
)
def test_user_ids_without_a_session_of_claude_code(value: Any) -> None:
    assert claude_code_session(value) is None


def test_sessions_of_claude_code_old_and_new() -> None:
    account = "0e9a3a62-7a0e-4a31-9d52-0c3df5d2a9ab"
    assert claude_code_session(f"user_{HASH}_account_{account}_session_{UUID}") == UUID
    assert claude_code_session(CLAUDE_CODE_OLD) == UUID
    assert claude_code_session(CLAUDE_CODE) == UUID


def test_headers_are_read_as_they_come_from_the_wire() -> None:
    raw = [
        (b"authorization", b"Bearer secret"),
        (b"session-id", b"first"),
        (b"session-id", b"second"),
        (b"x-base-rl-group", b"caf\xe9"),
    ]
    assert session_headers(raw) == {"session-id": "first", "x-base-rl-group": "café"}


def test_the_name_is_the_paths_before_all_others() -> None:
    hints = session_hints(path="p", headers={"session-id": "s"}, body={})
    assert (hints.path, hints.name) == ("p", "p")
    assert session_hints(path=None, headers={"session-id": "s"}, body={}).name == "s"
    assert SessionHints().name is None


def test_every_way_is_explained() -> None:
    assert all(by.meaning.endswith(".") for by in AttributedBy)
    assert not AttributedBy.AGENT_HEADER.outlives_sessions
    assert AttributedBy.PROJECT.outlives_sessions


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES: Any = st.fixed_dictionaries(
    {},
    optional={
        "prompt_cache_key": JSON,
        "user": JSON | st.just(CLAUDE_CODE),
        "metadata": JSON | st.dictionaries(st.sampled_from(["session_id", "user_id", "group"]), JSON),
    },
)
FOREIGN_HEADERS: Any = st.dictionaries(
    st.sampled_from(["session-id", "x-session-id", "openai-project", "traceparent"]), st.text()
)


@given(FOREIGN_HEADERS, BODIES)
def test_no_foreign_value_ever_fails_a_call(headers: dict[str, str], body: dict[str, Any]) -> None:
    hints = session_hints(path=None, headers=headers, body=body)
    for name in (hints.named.text if hints.named is not None else "x", hints.group or "x"):
        assert 0 < len(name) <= 200
        assert name.isprintable()
        assert name == name.strip()


def test_only_our_own_ids_have_their_form() -> None:
    assert is_session_id("ses_01m7zrfarp6b2yyrhdhydm4ajs")
    assert not is_session_id("ses_5a1b2c3d4e5fAbCdEfGhIjKlMn"), "as OpenCode writes its own"
