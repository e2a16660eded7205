"""Write answers in the wire format of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.calls.call import Answer, ModelCall, StreamHead
from proxy.dialects.responses.items import answer_status, output_items
from proxy.dialects.responses.response import response_object, response_usage
from proxy.dialects.responses.stream import ResponseStream
from proxy.dialects.responses.tools import special_tools


class Responses:
    """The dialect of POST /v1/responses."""

    name = "responses"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        return recorded_response(call.body, answer)

    def stream(self, call: ModelCall, head: StreamHead) -> ResponseStream:
        return ResponseStream(call, head)


def recorded_response(body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Return the whole Response object for an answer to a request with this body."""
    choice = answer.choices[0]
    return response_object(
        body,
        answer,
        status=answer_status(choice),
        output=output_items(answer.turn_id, choice, special_tools(body.get("tools"))),
        usage=response_usage(answer),
        fingerprint=answer.fingerprint,
    )
