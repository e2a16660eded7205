from __future__ import annotations

import itertools
import json
from hashlib import blake2b
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens import canonical
from proxy.tokens.canonical import (
    EMPTY,
    HASH_BYTES,
    canonical_arguments,
    conversation_hashes,
    extend_hash,
    normalise,
    text_of,
    tools_hash,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


def calling(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def hashed(message: dict[str, Any]) -> bytes:
    return extend_hash(EMPTY, message)


def typed(value: Any) -> Any:
    """Return the value under JavaScript's JSON equality: one kind of number, which is not a boolean."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number", float(value)
    return type(value).__name__, repr(value)


@given(OBJECTS, st.randoms())
def test_rewritten_arguments_are_equal(value: dict[str, Any], random: Any) -> None:
    keys = list(value)
    random.shuffle(keys)
    shuffled = {key: value[key] for key in keys}
    rewritten = json.dumps(shuffled, indent=2, ensure_ascii=False)
    assert hashed(calling(json.dumps(value))) == hashed(calling(rewritten))


@given(JSON, JSON)
def test_arguments_are_equal_exactly_when_the_json_is(left: Any, right: Any) -> None:
    same = canonical_arguments(json.dumps(left)) == canonical_arguments(json.dumps(right))
    assert same == (typed(left) == typed(right))


def test_numbers_and_booleans_are_distinguished() -> None:
    texts = ['{"a": 1}', '{"a": 1.5}', '{"a": true}', '{"a": "1"}', '{"a": null}', "{}"]
    assert len({canonical_arguments(text) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        ("1.0", "1"),
        ("-0.0", "0"),
        ("1e3", "1000"),
        ("12345678901234567890", "12345678901234567000"),
        ("1e21", "1e+21"),
        ("0.1", "0.10"),
    ],
)
def test_numbers_rewritten_by_javascript_are_equal(written: str, echoed: str) -> None:
    left, right = (hashed(calling(f'{{"a": {number}}}')) for number in (written, echoed))
    assert left == right
    assert canonical_arguments({"a": json.loads(written)}) == canonical_arguments(f'{{"a": {echoed}}}')


def test_white_space_around_an_answer_does_not_count() -> None:
    """Anthropic's clients remove it, because their API refuses it."""
    texts = ["a b", "\n\na b ", "a b\n"]
    assert len({hashed({"role": "assistant", "content": text}) for text in texts}) == 1
    assert len({hashed({"role": "user", "content": text}) for text in texts}) == len(texts)
    blank = calling("{}", content="\n")
    assert hashed(blank) == hashed(calling("{}"))


@pytest.mark.parametrize("text", ['{"a": NaN}', "{", "", "nul", "[" * 100_000, "9" * 5000])
def test_text_that_is_not_json_equals_only_itself(text: str) -> None:
    assert canonical_arguments(text) == canonical_arguments(text)
    assert canonical_arguments(text) != canonical_arguments(text + "x")


@given(ROLES, st.text(), st.lists(st.integers(0, 20), max_size=3))
def test_content_as_parts_equals_content_as_text(role: str, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [{"type": "text", "text": text[a:b]} for a, b in itertools.pairwise(edges)]
    assert hashed({"role": role, "content": parts}) == hashed({"role": role, "content": text})


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_null_empty_and_missing_content_are_alike(message: dict[str, Any]) -> None:
    assert hashed({"role": "assistant", **message}) == hashed({"role": "assistant"})


def test_ids_names_refusals_reasoning_and_provider_fields_do_not_count() -> None:
    plain = calling('{"a": 1}')
    noisy = calling('{"a":1}', name="bob", refusal=None, reasoning_content="hm", annotations=[], x_vendor=1)
    noisy["tool_calls"][0]["id"] = "other"
    noisy["tool_calls"][0]["index"] = 0
    assert hashed(plain) == hashed(noisy)


def test_role_text_and_calls_count() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        calling("{}"),
        calling("{}", content="a"),
        calling('{"a": 2}'),
    ]
    assert len({hashed(message) for message in messages}) == len(messages)


def test_developer_is_system() -> None:
    developer, system = ({"role": role, "content": "be brief"} for role in ("developer", "system"))
    assert hashed(developer) == hashed(system)


@given(st.lists(st.tuples(ROLES, st.text(max_size=5)), max_size=6), st.integers(0, 6))
def test_the_chain_of_a_beginning_is_the_beginning_of_the_chain(pairs: list[tuple[str, str]], cut: int) -> None:
    messages = [{"role": role, "content": text} for role, text in pairs]
    hashes = conversation_hashes(messages)
    assert conversation_hashes(messages[:cut]) == hashes[:cut]
    if messages:
        before = hashes[-2] if len(hashes) > 1 else bytes(16)
        assert extend_hash(before, messages[-1]) == hashes[-1]


@given(
    st.lists(st.tuples(ROLES, st.text(max_size=3)), max_size=4),
    st.lists(st.tuples(ROLES, st.text(max_size=3)), max_size=4),
)
def test_different_conversations_have_different_hashes(
    left: list[tuple[str, str]], right: list[tuple[str, str]]
) -> None:
    hashes = [conversation_hashes([{"role": r, "content": t} for r, t in pairs])[-1:] for pairs in (left, right)]
    plain = [
        [(role, text.strip() if role == "assistant" else text) for role, text in pairs] for pairs in (left, right)
    ]
    assert (hashes[0] == hashes[1]) == (plain[0] == plain[1])


def test_normalised_messages_have_text_and_no_nulls() -> None:
    message = calling(
        "", refusal=None, name=None, content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    )
    assert normalise(message) == {
        "role": "assistant",
        "content": "ab",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert normalise({"role": "developer", "content": None}) == {"role": "system", "content": ""}


def test_refusal_parts_are_text() -> None:
    assert text_of([{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "."}]) == "no."


@given(st.lists(OBJECTS, max_size=2))
def test_no_tools_and_an_empty_list_are_alike(tools: list[dict[str, Any]]) -> None:
    assert tools_hash(None) == tools_hash([])
    assert (tools_hash(tools) == tools_hash(None)) == (not tools)


@given(
    text=st.text(alphabet='ab"\\\n\x7fé😀 ', max_size=40),
    arguments=st.lists(st.text(alphabet='{}"a:1,é', max_size=20), max_size=2),
    piece=st.integers(1, 12),
)
def test_long_messages_are_hashed_in_pieces_to_the_same_hash(text: str, arguments: list[str], piece: int) -> None:
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    parts = ["assistant", text.strip(), [["f", canonical_arguments(each or "{}")] for each in arguments]]
    whole = blake2b(b"before" + json.dumps(parts).encode(), digest_size=HASH_BYTES).digest()
    assert extend_hash(b"before", message) == whole
    with mock.patch.object(canonical, "_PIECE", piece):
        assert extend_hash(b"before", message) == whole
