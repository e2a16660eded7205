"""Convert the input items of the Responses API into messages in the shape of chat completions.

An answer is several items (its reasoning, its text, each of its calls) but one message. Our items carry the id of
their turn in their own ids, so the items of one answer become one message again, however a client orders them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.calls.bounds import DEFAULT_BOUNDS, check_parts
from proxy.calls.conversation import KnownMessages, RememberedMessages
from proxy.calls.images import hint
from proxy.contract.identifiers import TurnId, part_id, turn_of_part
from proxy.dialects.fields import decode_element, list_at, object_at, plain, text_at
from proxy.dialects.responses.items import VERBATIM, Item, Message
from proxy.dialects.responses.tools import custom_arguments, offered_name
from proxy.errors import InvalidRequest, NotFound, UnsupportedParameter

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_SHELLS = {"local_shell_call": "local_shell", "shell_call": "shell"}
ADDED_TOOLS = "additional_tools"
"""The type of an item that adds tools to those of the request; it is no message."""

_OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
)


def references(items: Sequence[msgspec.Raw]) -> list[str]:
    """Return the ids that `item_reference` items name. Raise InvalidRequest if an item is not valid JSON."""
    decoded = (decode_element(raw, f"input[{index}]") for index, raw in enumerate(items))
    return [
        item["id"]
        for item in decoded
        if isinstance(item, dict) and _kind(item) == "item_reference" and isinstance(item.get("id"), str)
    ]


class UnknownItem(NotFound):
    """An `item_reference` names an item that the reader was not given."""


class ReaderState(msgspec.Struct, frozen=True, kw_only=True):
    """State of an ItemReader after some items, from which another one continues with the items that follow.

    `added_tools` are lists of tools by their place in the body. States are shared between requests, so nobody may
    change what they contain.
    """

    messages: tuple[Message, ...] = ()
    known: KnownMessages = KnownMessages()
    warnings: tuple[str, ...] = ()
    added_tools: dict[str, list[Any]] = {}
    answer_turn: TurnId | None = None


class ChangesEarlierAnswer(Exception):
    """An item belongs to an answer in the ReaderState, which cannot be changed: read all items from the first."""


class ItemReader:
    """Converter of items into messages.

    `referenced` are the items that `item_reference` items may name, by id. `start` is the state of an earlier reader,
    whose items are not read again. `most_parts` bounds the content parts of one item.
    """

    def __init__(
        self,
        referenced: Mapping[str, Item],
        start: ReaderState = ReaderState(),  # noqa: B008
        *,
        most_parts: int = DEFAULT_BOUNDS.max_parts,
    ) -> None:
        self._most_parts = most_parts
        # Answers whose texts are still lists of parts: appending to a string for each item would take time quadratic
        # in the number of items.
        self._unjoined: list[Message] = []
        self.messages: list[Message] = list(start.messages)
        self.warnings: list[str] = list(start.warnings)
        self.added_tools: dict[str, list[Any]] = dict(start.added_tools)
        self._start = start
        self._referenced = referenced
        self._answer: Message | None = None
        self._answer_turn: TurnId | None = start.answer_turn

    def read(self, items: Sequence[msgspec.Raw], first: int = 0) -> None:
        """Read the items from index `first` on.

        Raise InvalidRequest with the exact place, UnsupportedParameter for content that is not text, UnknownItem, or
        ChangesEarlierAnswer.
        """
        for index in range(first, len(items)):
            where = f"input[{index}]"
            self._read_item(object_at(decode_element(items[index], where), where), where)
        for answer in self._unjoined:
            for key in ("content", "reasoning_content"):
                if isinstance(answer.get(key), list):
                    answer[key] = "".join(answer[key])
        self._unjoined.clear()

    def say(self, role: str, text: str) -> None:
        """Append a message that is no item: the instructions, or an input that is plain text."""
        self._add({"role": role, "content": text})

    @property
    def conversation(self) -> RememberedMessages:
        """All messages; those of the initial state are marked as known."""
        return RememberedMessages(self.messages, start=len(self._start.messages), known=self._start.known)

    def state(self) -> ReaderState | None:
        """Return the state after the items read so far; None if the next item may extend the last message."""
        if not self.messages or self.messages[-1] is self._answer:
            return None
        return ReaderState(
            messages=tuple(self.messages),
            known=self._start.known.followed_by(self.messages[len(self._start.messages) :]),
            warnings=tuple(self.warnings),
            added_tools=self.added_tools,
            answer_turn=self._answer_turn,
        )

    def _read_item(self, item: Item, where: str) -> None:
        kind = _kind(item)
        if kind == "message":
            self._read_message(item, where)
        elif kind == "item_reference":
            self._read_item(self._resolve(item, where), where)
        elif kind == "reasoning":
            self._read_reasoning(item, where)
        elif kind in _OUTPUTS:
            self._read_output(item, where)
        elif kind in ("function_call", "custom_tool_call", "apply_patch_call", *_SHELLS):
            self._read_call(kind, item, where)
        elif not isinstance(kind, str):
            raise InvalidRequest("an item must have a type, or a role if it is a message", param=f"{where}.type")
        elif kind == ADDED_TOOLS:
            self.added_tools[f"{where}.tools"] = list_at(item.get("tools"), f"{where}.tools")
        else:
            self.warnings.append(f"{where} of type {plain(kind)} is ignored")

    def _resolve(self, item: Item, where: str) -> Item:
        name = text_at(item.get("id"), f"{where}.id")
        if name not in self._referenced:
            raise UnknownItem(f"no item {name!r} is visible to this key", param=f"{where}.id")
        return self._referenced[name]

    def _read_message(self, item: Item, where: str) -> None:
        role = text_at(item.get("role"), f"{where}.role")
        if role not in _ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        if item.get("content") is None and role != "assistant":
            raise InvalidRequest(f"a message of role {role} must have content", param=f"{where}.content")
        text = self._text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._add({"role": role, "content": text})
            return
        message = self._answer_with(item, begins=True)
        if message["content"] is None:
            message["content"] = []
        message["content"].append(text)

    def _read_reasoning(self, item: Item, where: str) -> None:
        # Only `content` is read: `encrypted_content` comes from another server, and only that server can decrypt it.
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
            raise InvalidRequest("the output of a call must be text or a list of parts", param=f"{where}.output")
        if item["type"] == "shell_call_output":  # its output is structured: one object for each command
            message: Message = {"role": "tool", "content": _json(output)}
        else:
            message = {"role": "tool", "content": self._text(output, f"{where}.output")}
        if item.get("call_id") is not None:
            message["tool_call_id"] = text_at(item["call_id"], f"{where}.call_id")
        self.messages.append(message)

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._answer = self._answer_turn = None

    def _answer_with(self, item: Item, *, begins: bool) -> Message:
        """Return the answer that an item belongs to, and append a new one if it belongs to none.

        An item belongs to the last answer if both name the same turn. If either of them names none, it belongs to
        the last answer if nothing stands between them, unless it `begins` an answer (as text and reasoning do) and
        the last one already has text or calls.
        """
        turn, last = turn_of_part(item.get("id")), self._answer
        if last is None and turn is not None and turn == self._answer_turn:
            raise ChangesEarlierAnswer
        if last is not None:
            if turn is not None and turn == self._answer_turn:
                return last
            may_continue = self.messages[-1] is last and not (turn and self._answer_turn)
            if may_continue and not (begins and (last["content"] is not None or "tool_calls" in last)):
                self._answer_turn = turn or self._answer_turn
                return last
        self._answer, self._answer_turn = {"role": "assistant", "content": None}, turn
        if turn is not None:  # the id tells the search for the parent turn which recorded answer this is
            self._answer["id"] = part_id("msg", turn)
        self.messages.append(self._answer)
        self._unjoined.append(self._answer)
        return self._answer

    def _text(self, content: Any, where: str) -> str:
        """Return the text of `content`, which is null, a string or a list of text parts."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise InvalidRequest("content must be text or a list of parts", param=where)
        check_parts(content, where, self._most_parts)
        return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _kind(item: Item) -> Any:
    # OpenAI's API accepts messages without a type, and references with an id alone.
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
    item_id = item.get("id")
    is_verbatim = isinstance(item_id, str) and item_id.endswith(VERBATIM) and turn_of_part(item_id) is not None
    return text if is_verbatim else custom_arguments(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
