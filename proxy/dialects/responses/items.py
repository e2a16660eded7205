"""Items of the Responses API and the messages that they stand for, in both directions.

An answer is several items: its reasoning, its text, each of its calls. As a message it is one. Our items carry their
turn in their ids, so that however a client lays them out, those of one answer become that one answer again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.calls.bounds import DEFAULT_BOUNDS, check_parts
from proxy.calls.call import CallDelta, Choice, TokenLogprob
from proxy.calls.conversation import KnownMessages, RememberedMessages
from proxy.calls.images import hint
from proxy.contract.identifiers import TurnId, part_id, turn_of_part
from proxy.contract.turn import FinishReason
from proxy.dialects.fields import decode_element, list_at, object_at, plain, text_at
from proxy.dialects.responses.tools import SpecialTools, arguments_of, input_of, offered_name
from proxy.errors import InvalidRequest, NotFound, UnsupportedParameter
from proxy.tokens.canonical import text_of
from proxy.tokens.formats import ToolCall

Item = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_SHELLS = {"local_shell_call": "local_shell", "shell_call": "shell"}
_VERBATIM = "_verbatim"
"""Ends the id of a custom tool call whose input is the model's own arguments, because they had no text to unwrap."""
ADDED_TOOLS = "additional_tools"
"""An item that is no message: it adds tools to those of the request."""

_OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
)


def references(items: Sequence[msgspec.Raw]) -> list[str]:
    """The ids that `item_reference` items name. Raises InvalidRequest."""
    decoded = (decode_element(raw, f"input[{index}]") for index, raw in enumerate(items))
    return [
        item["id"]
        for item in decoded
        if isinstance(item, dict) and _kind(item) == "item_reference" and isinstance(item.get("id"), str)
    ]


class UnknownItem(NotFound):
    """A reference to an item that is not at hand."""


class ReadItems(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader is behind some items. `added_tools` are by their place. Nobody changes what it holds."""

    messages: tuple[Message, ...] = ()
    known: KnownMessages = KnownMessages()
    warnings: tuple[str, ...] = ()
    added_tools: dict[str, list[Any]] = {}
    answer_turn: TurnId | None = None


class RememberedAnswer(Exception):
    """An item belongs to an answer among the items that were read before: they are to be read again."""


class ItemReader:
    """Items into messages. `referenced` are the items that others refer to by id; `behind` is where an earlier reader
    was, whose items are not read again. `most_parts` bounds the content parts of one item.

    While it reads, the texts of an answer are lists of their parts: joining them one by one takes time by the square
    of their number.
    """

    def __init__(
        self,
        referenced: Mapping[str, Item],
        behind: ReadItems = ReadItems(),  # noqa: B008
        *,
        most_parts: int = DEFAULT_BOUNDS.max_parts,
    ) -> None:
        self._most_parts = most_parts
        self._answers: list[Message] = []
        """Those whose texts are not joined yet."""
        self.messages: list[Message] = list(behind.messages)
        self.warnings: list[str] = list(behind.warnings)
        self.added_tools: dict[str, list[Any]] = dict(behind.added_tools)
        self._behind = behind
        self._referenced = referenced
        self._answer: Message | None = None
        self._answer_turn: TurnId | None = behind.answer_turn

    def read(self, items: Sequence[msgspec.Raw], first: int = 0) -> None:
        """Reads from the item of number `first`. Raises InvalidRequest, with the exact place; UnknownItem,
        RememberedAnswer."""
        for index in range(first, len(items)):
            where = f"input[{index}]"
            self._read_item(object_at(decode_element(items[index], where), where), where)
        for answer in self._answers:
            for key in ("content", "reasoning_content"):
                if isinstance(answer.get(key), list):
                    answer[key] = "".join(answer[key])
        self._answers.clear()

    def say(self, role: str, text: str) -> None:
        self._add({"role": role, "content": text})

    @property
    def conversation(self) -> RememberedMessages:
        """The messages, those that were known before marked as such."""
        return RememberedMessages(self.messages, start=len(self._behind.messages), known=self._behind.known)

    def state(self) -> ReadItems | None:
        """Where it is now; None where what comes next may change what was read."""
        if not self.messages or self.messages[-1] is self._answer:
            return None
        return ReadItems(
            messages=tuple(self.messages),
            known=self._behind.known.followed_by(self.messages[len(self._behind.messages) :]),
            warnings=tuple(self.warnings),
            added_tools=self.added_tools,
            answer_turn=self._answer_turn,
        )

    def _read_item(self, item: Item, where: str) -> None:
        kind = _kind(item)
        if kind == "message":
            self._read_message(item, where)
        elif kind == "item_reference":
            self._read_item(self._refer(item, where), where)
        elif kind == "reasoning":
            self._read_reasoning(item, where)
        elif kind in _OUTPUTS:
            self._read_output(item, where)
        elif kind in ("function_call", "custom_tool_call", "apply_patch_call", *_SHELLS):
            self._read_call(kind, item, where)
        elif not isinstance(kind, str):
            raise InvalidRequest("an item has a type, and a message a role", param=f"{where}.type")
        elif kind == ADDED_TOOLS:
            self.added_tools[f"{where}.tools"] = list_at(item.get("tools"), f"{where}.tools")
        else:
            self.warnings.append(f"{where} of type {plain(kind)} is ignored")

    def _refer(self, item: Item, where: str) -> Item:
        name = text_at(item.get("id"), f"{where}.id")
        if name not in self._referenced:
            raise UnknownItem(f"there is no item {name!r} that this key can refer to", param=f"{where}.id")
        return self._referenced[name]

    def _read_message(self, item: Item, where: str) -> None:
        role = text_at(item.get("role"), f"{where}.role")
        if role not in _ROLES:
            raise InvalidRequest(f"role is one of {', '.join(_ROLES)}", param=f"{where}.role")
        if item.get("content") is None and role != "assistant":
            raise InvalidRequest(f"a message of role {role} has content", param=f"{where}.content")
        text = self._text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._add({"role": role, "content": text})
            return
        message = self._answer_with(item, begins=True)
        if message["content"] is None:
            message["content"] = []
        message["content"].append(text)

    def _read_reasoning(self, item: Item, where: str) -> None:
        """What is encrypted is not ours, and not read."""
        content = item.get("content")
        message = self._answer_with(item, begins=True)
        if content:
            message.setdefault("reasoning_content", []).append(self._text(content, f"{where}.content"))

    def _read_call(self, kind: str, item: Item, where: str) -> None:
        if kind == "function_call":
            name = _tool_name(item, where)
            arguments = text_at(item.get("arguments"), f"{where}.arguments")
        elif kind == "custom_tool_call":
            name = _tool_name(item, where)
            arguments = _custom_arguments(item, where)
        elif kind == "apply_patch_call":
            name, arguments = "apply_patch", _json(object_at(item.get("operation"), f"{where}.operation"))
        else:
            name, arguments = _SHELLS[kind], _json(object_at(item.get("action"), f"{where}.action"))
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if item.get("call_id") is not None:
            call = {"id": text_at(item["call_id"], f"{where}.call_id"), **call}
        self._answer_with(item, begins=False).setdefault("tool_calls", []).append(call)

    def _read_output(self, item: Item, where: str) -> None:
        output = item.get("output")
        if output is None:
            raise InvalidRequest("the output of a call is text or a list of parts", param=f"{where}.output")
        if item["type"] == "shell_call_output":
            message: Message = {"role": "tool", "content": _json(output)}
        else:
            message = {"role": "tool", "content": self._text(output, f"{where}.output")}
        named = item.get("call_id")
        if named is not None:
            message["tool_call_id"] = text_at(named, f"{where}.call_id")
        self.messages.append(message)

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._answer = self._answer_turn = None

    def _answer_with(self, item: Item, *, begins: bool) -> Message:
        """The answer that an item is part of: the last one, where the item is of the same turn, or else may be. An
        item that `begins` an answer is not part of one that already has text or calls."""
        turn, last = turn_of_part(item.get("id")), self._answer
        if last is None and turn is not None and turn == self._answer_turn:
            raise RememberedAnswer
        if last is not None:
            if turn is not None and turn == self._answer_turn:
                return last
            goes_on = self.messages[-1] is last and not (turn and self._answer_turn)
            if goes_on and not (begins and (last["content"] is not None or "tool_calls" in last)):
                self._answer_turn = turn or self._answer_turn
                return last
        self._answer, self._answer_turn = {"role": "assistant", "content": None}, turn
        if turn is not None:
            self._answer["id"] = part_id("msg", turn)
        self.messages.append(self._answer)
        self._answers.append(self._answer)
        return self._answer

    def _text(self, content: Any, where: str) -> str:
        """The text of content: a string, or parts of text."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise InvalidRequest("content is text or a list of parts", param=where)
        check_parts(content, where, self._most_parts)
        return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def output_items(turn_id: str, choice: Choice, special: SpecialTools) -> list[Item]:
    """An answer as items: reasoning, text, calls. Without calls there always is a message, be it empty."""
    items: list[Item] = []
    if choice.reasoning:
        items.append(reasoning_item(turn_id, choice.reasoning))
    if choice.text or not choice.tool_calls:
        items.append(message_item(turn_id, choice.text, status_of(choice), choice.logprobs or ()))
    return [*items, *(call_item(turn_id, made, special) for made in choice.tool_calls)]


def status_of(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"


def reasoning_item(turn_id: str, text: str, number: int = 0) -> Item:
    return {
        "id": part_id("rs", turn_id, number or None),
        "type": "reasoning",
        "summary": [],
        "content": [reasoning_part(text)],
        "encrypted_content": None,
    }


def message_item(turn_id: str, text: str, status: str, logprobs: Iterable[TokenLogprob], number: int = 0) -> Item:
    return {
        "id": part_id("msg", turn_id, number or None),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text, logprobs)],
    }


def reasoning_part(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": wire_logprobs(logprobs)}


def call_item(turn_id: str, made: CallDelta, special: SpecialTools) -> Item:
    """A call as the client declared the tool."""
    tool, index = special.get(made.call.name), made.call.index
    name: Item = {"name": tool.name if tool else made.call.name}
    if tool is not None and tool.namespace is not None:
        name["namespace"] = tool.namespace
    if tool is None or not tool.custom:
        return {
            "id": part_id("fc", turn_id, index),
            "type": "function_call",
            "status": "completed",
            "call_id": made.id,
            **name,
            "arguments": made.call.arguments,
        }
    text = input_of(made.call.arguments)
    suffix = "" if text is not None else _VERBATIM
    return {
        "id": part_id("ctc", turn_id, index) + suffix,
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": made.id,
        **name,
        "input": made.call.arguments if text is None else text,
    }


def wire_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            **_wire_token(entry.token, entry.logprob),
            "top_logprobs": [_wire_token(other.token, other.logprob) for other in entry.top],
        }
        for entry in tokens
    ]


def input_items(turn_id: str, messages: Sequence[Message], special: SpecialTools) -> list[Item]:
    """A conversation as the items that were sent for it."""
    items: list[Item] = []
    custom_calls: set[str] = set()
    for message in messages:
        items += _items_of(message, special, custom_calls)
    for position, item in enumerate(items):
        item["id"] = part_id("item", turn_id, position)
    return items


def _items_of(message: Message, special: SpecialTools, custom_calls: set[str]) -> list[Item]:
    role, text = message["role"], text_of(message.get("content"))
    if role == "tool":
        call_id = message.get("tool_call_id")
        kind = "custom_tool_call_output" if call_id in custom_calls else "function_call_output"
        return [{"id": "", "type": kind, "status": "completed", "call_id": call_id, "output": text}]
    if role != "assistant":
        content = [{"type": "input_text", "text": text}]
        return [{"id": "", "type": "message", "role": role, "status": "completed", "content": content}]
    items: list[Item] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item("", message["reasoning_content"]))
    if text or not message.get("tool_calls"):
        items.append(message_item("", text, "completed", ()))
    for call in message.get("tool_calls") or ():
        item = _item_of_call(call, special)
        if item["type"] == "custom_tool_call":
            custom_calls.add(item["call_id"])
        items.append(item)
    return items


def _item_of_call(call: Mapping[str, Any], special: SpecialTools) -> Item:
    function = call["function"]
    known = ToolCall(index=0, name=function["name"], arguments=function.get("arguments") or "{}")
    return call_item("", CallDelta(call.get("id") or "", known), special)


def _kind(item: Item) -> Any:
    """Messages need not say that they are, and references are known by their id alone."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if kind is None and set(item) <= {"id", "type"} and "id" in item:
        return "item_reference"
    return kind


def _part_text(value: Any, where: str) -> str:
    part = object_at(value, where)
    kind = text_at(part.get("type"), f"{where}.type")
    if kind in _TEXT_PARTS:
        return text_at(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return text_at(part.get("refusal"), f"{where}.refusal")
    raise UnsupportedParameter(
        f"content of type {kind!r} is not supported: text only{hint(kind)}", param=f"{where}.type"
    )


def _tool_name(item: Item, where: str) -> str:
    namespace = item.get("namespace")
    return offered_name(
        text_at(item.get("name"), f"{where}.name"),
        text_at(namespace, f"{where}.namespace") if namespace is not None else None,
    )


def _custom_arguments(item: Item, where: str) -> str:
    text = text_at(item.get("input"), f"{where}.input")
    own = item.get("id")
    is_verbatim = isinstance(own, str) and own.endswith(_VERBATIM) and turn_of_part(own) is not None
    return text if is_verbatim else arguments_of(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _wire_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
