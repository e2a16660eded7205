"""Equality of conversations: canonical messages, and a hash chain over them.

Clients send answers back with small changes: content as parts, null for empty, tool arguments reformatted, ids
replaced. Two messages are equal here if role, text and tool calls (name, and arguments as JSON values) are equal.
Four differences are ignored:

- the order of keys in arguments;
- the form of numbers, as JavaScript clients parse them: 1.0 is 1, and integers beyond 2^53 are the nearest double;
- white space around an answer: Anthropic's API refuses answers that end with it, so clients strip it;
- a thought at the beginning of an answer's text, in models whose thoughts stay text: clients drop it from the
history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from json.encoder import encode_basestring_ascii as _json_text
from typing import Any, overload

HASH_BYTES = 16
_USUAL_FIELDS = frozenset({"role", "content"})
_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"
EMPTY = bytes(HASH_BYTES)
"""The hash of a conversation without messages."""

# Characters escaped in one call, which takes about a millisecond and blocks other threads meanwhile.
_PIECE = 1 << 18

# Doubles represent all integers up to here exactly.
_EXACT_INTEGERS = 2**53


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of parts, or None. Parts without text add nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else ""


def normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wire message as chat templates read it: text content, no nulls, `developer` as `system`."""
    role = message["role"]
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content")),
    }
    if _USUAL_FIELDS.issuperset(message):
        return plain
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            plain[key] = message[key]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


class NormalMessages(Sequence[Mapping[str, Any]]):
    """Wire messages, each normalised at its first access: most calls access only the newest ones."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._messages = messages
        self._known: dict[int, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self._messages)))]
        return self._at(index if index >= 0 else range(len(self._messages))[index])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._at, range(len(self._messages)))

    def _at(self, position: int) -> Mapping[str, Any]:
        if position not in self._known:
            self._known[position] = normalise(self._messages[position])
        return self._known[position]


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    plain: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"},
    }
    if call.get("id") is not None:
        plain["id"] = call["id"]
    return plain


def canonical_arguments(arguments: Any) -> str:
    """Return a text that is equal for equal JSON values. Text that is not JSON equals only itself."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse)
        return "json:" + json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "text:" + text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _EXACT_INTEGERS else value


def _canonical_parts(message: Mapping[str, Any]) -> tuple[str, str, list[list[str]]]:
    """Return role, text, and name and arguments of every call: equal for equal messages, different for others."""
    role, calls = message["role"], message.get("tool_calls")
    canonical_calls = [_canonical_call(call["function"]) for call in calls] if calls else []
    text = text_of(message.get("content"))
    if role == "assistant":
        text = without_thought(text).strip()
    return "system" if role == "developer" else role, text, canonical_calls


def _canonical_call(function: Mapping[str, Any]) -> list[str]:
    return [function["name"], canonical_arguments(function.get("arguments") or "{}")]


def without_thought(text: str) -> str:
    """Return an answer's text without a thought at its beginning: some clients send it back, others drop it."""
    thought, end, answer = text.partition(_THOUGHT_END)
    begins_with_it = end and (_THOUGHT_BEGIN not in thought or thought.lstrip().startswith(_THOUGHT_BEGIN))
    return answer if begins_with_it else text


def extend_hash(previous: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the hash of the conversation hashed as `previous`, extended by `message`.

    It is over the JSON list of the message's role, text and calls.
    """
    role, text, calls = _canonical_parts(message)
    if calls or len(text) > _PIECE:
        return _extend_in_pieces(previous, role, text, calls)
    canonical = f"[{_json_text(role)}, {_json_text(text)}, []]"  # as `json.dumps` writes it, at less cost
    return blake2b(previous + canonical.encode(), digest_size=HASH_BYTES).digest()


def _extend_in_pieces(previous: bytes, role: str, text: str, calls: list[list[str]]) -> bytes:
    """Return the hash that `extend_hash` defines, without a C call that holds the interpreter's lock for long."""
    hasher = blake2b(previous, digest_size=HASH_BYTES)
    hasher.update(f"[{_json_text(role)}, ".encode())
    _update_with_text(hasher, text)
    hasher.update(b", [")
    for index, (name, arguments) in enumerate(calls):
        hasher.update((", " if index else "").encode() + f"[{_json_text(name)}, ".encode())
        _update_with_text(hasher, arguments)
        hasher.update(b"]")
    hasher.update(b"]]")
    return hasher.digest()


def _update_with_text(hasher: blake2b, text: str) -> None:
    """Add `text` as a JSON string. JSON escapes character by character, so pieces can be escaped separately."""
    hasher.update(b'"')
    for start in range(0, len(text), _PIECE):
        hasher.update(_json_text(text[start : start + _PIECE])[1:-1].encode())
    hasher.update(b'"')


def conversation_hashes(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return one hash for each message: that of the conversation up to and including it."""
    hashes, current = [], EMPTY
    for message in messages:
        current = extend_hash(current, message)
        hashes.append(current)
    return hashes


def tools_hash(tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any] | None = None) -> bytes:
    """Return the hash of the template's other inputs. The key order of tools counts, since templates write tools as
    they came; the order of arguments does not."""
    return _tools_hash(tools, arguments) if tools or arguments else _NO_TOOLS


def _tools_hash(tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any] | None) -> bytes:
    text = json.dumps(list(tools or ()), separators=(",", ":"))
    if arguments:
        text += json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


_NO_TOOLS = _tools_hash(None, None)
