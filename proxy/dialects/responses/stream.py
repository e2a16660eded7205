"""A response as its events. Items open when their first piece comes, in that order, and close when another opens:
tool calls come whole. Every event has its number, so that a client can tell whether it missed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.calls.call import Answer, CallDelta, Delta, ModelCall, ReasoningDelta, StreamHead, TextDelta, TokenLogprob
from proxy.dialects.events import PING, event
from proxy.dialects.responses.items import (
    Item,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
    wire_logprobs,
)
from proxy.dialects.responses.response import response_object, response_status, usage_of
from proxy.dialects.responses.tools import special_tools

_REASONING = "response.reasoning_text"
_TEXT = "response.output_text"


class _Open:
    """The item that pieces of text go to."""

    def __init__(self, kind: str, item: Item) -> None:
        self.kind = kind
        self.item = item
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []


class ResponseStream:
    """The events of one response."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._call = call
        self._head = head
        self._special = special_tools(call.body.get("tools"))
        self._sent = 0
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._opened = {_REASONING: 0, _TEXT: 0}

    def opening(self) -> bytes:
        response = response_object(self._call.body, self._head, status="in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            return self._close("completed") + self._whole_call(delta)
        if isinstance(delta, ReasoningDelta):
            return self._reach(_REASONING) + self._piece(delta.text)
        return self._reach(_TEXT) + self._text(delta)

    def ping(self) -> bytes:
        return PING

    def closing(self, answer: Answer) -> bytes:
        choice = answer.choices[0]
        status = response_status(choice)
        ending = self._close(status)
        if not choice.text and not choice.tool_calls:
            ending += self._reach(_TEXT) + self._close(status)
        response = response_object(
            self._call.body,
            answer,
            status=status,
            output=self._output,
            usage=usage_of(answer),
            fingerprint=answer.fingerprint,
        )
        return ending + self._event(f"response.{status}", response=response)

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        """The event that SDKs raise, and for who waits for the response's end, that."""
        error = envelope["error"]
        told = {"code": error["code"], "message": error["message"], "param": error["param"], "error": error}
        response = response_object(
            self._call.body,
            self._head,
            status="failed",
            output=self._output,
            error={"code": "server_error", "message": error["message"]},
        )
        return self._event("error", **told) + self._event("response.failed", response=response)

    def _reach(self, kind: str) -> bytes:
        """Opens an item of this kind, unless it is open."""
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
        self._open = _Open(kind, item)
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
        """Ends the open item, if there is one."""
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
        told = self._item("added", {**item, "status": "in_progress", field: ""})
        told += self._event(f"{name}.delta", **place, delta=item[field])
        told += self._event(f"{name}.done", **place, **{field: item[field]})
        told += self._item("done", item)
        self._output.append(item)
        return told

    def _item(self, what: str, item: Item) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._output), item=item)

    def _in_item(self, name: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open.item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        numbered = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event(numbered, name)
