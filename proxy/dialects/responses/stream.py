"""Write the stream of a response as the events of the Responses API.

An item opens with its first piece of text and closes when the next item opens. Tool calls are written whole. Events
are numbered, so that a client can detect a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.calls.call import Answer, CallDelta, Delta, ModelCall, ReasoningDelta, StreamHead, TextDelta, TokenLogprob
from proxy.dialects.events import PING, event
from proxy.dialects.responses.items import (
    Item,
    answer_status,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
    wire_logprobs,
)
from proxy.dialects.responses.response import response_object, response_usage
from proxy.dialects.responses.tools import special_tools

_REASONING = "response.reasoning_text"
_TEXT = "response.output_text"


class _OpenItem:
    """The item to which pieces of text are appended. `kind` is the prefix of its events' names."""

    def __init__(self, kind: str, item: Item) -> None:
        self.kind = kind
        self.item = item
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []


class ResponseStream:
    """Writer of one response as events."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._call = call
        self._head = head
        self._special = special_tools(call.body.get("tools"))
        self._sent = 0
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._opened = {_REASONING: 0, _TEXT: 0}  # items so far, which number the ids of later items

    def opening(self) -> bytes:
        response = response_object(self._call.body, self._head, status="in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            return self._close("completed") + self._whole_call(delta)
        if isinstance(delta, ReasoningDelta):
            return self._ensure_open(_REASONING) + self._piece(delta.text)
        return self._ensure_open(_TEXT) + self._text(delta)

    def ping(self) -> bytes:
        return PING

    def closing(self, answer: Answer) -> bytes:
        choice = answer.choices[0]
        status = answer_status(choice)
        ending = self._close(status)
        if not choice.text and not choice.tool_calls:  # the whole response has an empty message then, too
            ending += self._ensure_open(_TEXT) + self._close(status)
        response = response_object(
            self._call.body,
            answer,
            status=status,
            output=self._output,
            usage=response_usage(answer),
            fingerprint=answer.fingerprint,
        )
        return ending + self._event(f"response.{status}", response=response)

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        # SDKs raise an exception on `error`; clients that wait for the end of the response need `response.failed`.
        error = envelope["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"], "error": error}
        response = response_object(
            self._call.body,
            self._head,
            status="failed",
            output=self._output,
            error={"code": "server_error", "message": error["message"]},
        )
        return self._event("error", **fields) + self._event("response.failed", response=response)

    def _ensure_open(self, kind: str) -> bytes:
        """Open an item of this kind and close the one before, unless an item of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        closed = self._close("completed")
        turn_id = self._head.turn_id
        if kind == _REASONING:
            item, part = reasoning_item(turn_id, "", self._opened[kind]), reasoning_part("")
        else:
            item, part = message_item(turn_id, "", "in_progress", (), self._opened[kind]), text_part("")
        item["content"] = []
        self._opened[kind] += 1
        self._open = _OpenItem(kind, item)
        return closed + self._item("added", item) + self._in_item("response.content_part.added", part=part)

    def _text(self, delta: TextDelta) -> bytes:
        assert self._open is not None
        self._open.logprobs += delta.logprobs
        return self._piece(delta.text, logprobs=wire_logprobs(delta.logprobs))

    def _piece(self, text: str, **more: Any) -> bytes:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._in_item(f"{self._open.kind}.delta", delta=text, **more)

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one, with this status."""
        opened = self._open
        if opened is None:
            return b""
        text = "".join(opened.pieces)
        if opened.kind == _REASONING:
            part = reasoning_part(text)
            done, item = self._in_item(f"{_REASONING}.done", text=text), {**opened.item, "content": [part]}
        else:
            part = text_part(text, opened.logprobs)
            done = self._in_item(f"{_TEXT}.done", text=text, logprobs=part["logprobs"])
            item = {**opened.item, "status": status, "content": [part]}
        done += self._in_item("response.content_part.done", part=part) + self._item("done", item)
        self._output.append(item)
        self._open = None
        return done

    def _whole_call(self, made: CallDelta) -> bytes:
        item = call_item(self._head.turn_id, made, self._special)
        name, field = (
            ("response.custom_tool_call_input", "input")
            if item["type"] == "custom_tool_call"
            else ("response.function_call_arguments", "arguments")
        )
        place = {"item_id": item["id"], "output_index": len(self._output)}
        events = self._item("added", {**item, "status": "in_progress", field: ""})
        events += self._event(f"{name}.delta", **place, delta=item[field])
        events += self._event(f"{name}.done", **place, **{field: item[field]})
        events += self._item("done", item)
        self._output.append(item)
        return events

    def _item(self, change: str, item: Item) -> bytes:
        return self._event(f"response.output_item.{change}", output_index=len(self._output), item=item)

    def _in_item(self, name: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open.item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(numbered, name)
