"""The endpoints of the Responses API: create a response, count its tokens, read recorded responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from proxy.auth.access import Principal
from proxy.auth.http import principal
from proxy.calls.call import ModelCall, PreviousAnswer
from proxy.calls.conversation import RememberedMessages
from proxy.calls.recorded import RecordedAnswers, answer_of
from proxy.calls.runtime import ModelRuntime
from proxy.contract.identifiers import turn_of_part
from proxy.contract.turn import TurnState
from proxy.database.unit_of_work import Database
from proxy.dialects.endpoints import PREFIXES, answer, caller, calls_of
from proxy.dialects.responses.dialect import Responses, recorded_response
from proxy.dialects.responses.items import Item, input_items, output_items
from proxy.dialects.responses.request import ResponseBody, UnresolvedReferences, read_response_request
from proxy.dialects.responses.tools import special_tools
from proxy.dialects.streaming import json_response
from proxy.errors import InvalidRequest, NotFound, PermissionDenied, PreviousResponseNotFound, UnsupportedParameter
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.turns.conversations import Conversations, RecordedTurn

router = APIRouter(tags=["models"])

_RESPONSES = Responses()
_LISTED = 20
_MOST_LISTED = 100


async def create_response(request: Request) -> Response:
    """Answer items, streamed or whole."""
    who = await caller(request)
    model = await calls_of(request).model_of(who.principal, await request.body())
    return await answer(request, await _call(request, who.principal, model.runtime), who, model, _RESPONSES)


async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a request's prompt. Nothing is generated or recorded."""
    who = await principal(request)
    model = await calls_of(request).model_of(who, await request.body())
    counted = await calls_of(request).count_tokens(await _call(request, who, model.runtime), model)
    return json_response({"object": "response.input_tokens", "input_tokens": counted})


async def get_response(request: Request, response_id: str) -> Response:
    """Return a response again, as it was recorded."""
    if request.query_params.get("stream") == "true":
        raise UnsupportedParameter("a recorded response is given whole", param="stream")
    turn = await _find(request, response_id)
    return json_response(_as_recorded(turn))


async def list_input_items(request: Request, response_id: str) -> Response:
    """List the items that a response answered, including those of the responses before it, the newest first."""
    turn = await _find(request, response_id)
    messages = await _recorded(request).asked(turn)
    if _begins_with_instructions(turn.request, messages):
        messages = messages[1:]
    items = input_items(turn.id, messages, special_tools(turn.request.get("tools")))
    return json_response(_page(items, request.query_params))


async def delete_response(request: Request, response_id: str) -> Response:
    """Refuse to delete a response: responses are recorded turns, which are trained."""
    await _find(request, response_id)
    raise PermissionDenied("a response is a recorded turn that is trained on: it is not deleted by its client")


async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse to cancel a response: there are no responses in the background."""
    await _find(request, response_id)
    raise InvalidRequest("only a response in the background can be cancelled: to end a call, close its connection")


async def compact_response(_request: Request) -> Response:
    """Answer 404: the proxy does not rewrite conversations. Clients then compact them by themselves."""
    raise NotFound("conversations are not compacted here: compact them in the client")


_FOUND = described(answers={200: "As it was recorded."})
_REFUSED = described(answers={})

for _prefix in PREFIXES:
    _shown = _prefix == "/v1"
    for _path, _method, _handler, _described in (
        ("", "POST", create_response, described(ResponseBody, answers={200: "The response."}, may_stream=True)),
        ("/compact", "POST", compact_response, _REFUSED),
        ("/input_tokens", "POST", count_input_tokens, described(ResponseBody, answers={200: "The count."})),
        ("/{response_id}", "GET", get_response, _FOUND),
        ("/{response_id}", "DELETE", delete_response, _REFUSED),
        ("/{response_id}/cancel", "POST", cancel_response, _REFUSED),
        ("/{response_id}/input_items", "GET", list_input_items, _FOUND),
    ):
        router.add_api_route(
            f"{_prefix}/responses{_path}",
            _handler,
            methods=[_method],
            include_in_schema=_shown,
            openapi_extra=_described,
        )


async def _call(request: Request, who: Principal, runtime: ModelRuntime) -> ModelCall:
    """Return the call of the request, with everything that it refers to."""
    calls, recorded = calls_of(request), _recorded(request)
    body = await request.body()
    parse = partial(
        read_response_request, known=runtime.template_arguments, memory=calls.remembered, bounds=calls.bounds
    )
    try:
        call = await calls.read(body, parse, runtime)
    except UnresolvedReferences as error:
        found = await _referenced(recorded, who, error.ids)
        call = await calls.read(body, partial(parse, referenced=found), runtime)
    return call if call.previous is None else await _go_on(recorded, who, call, call.previous)


def _recorded(request: Request) -> RecordedAnswers:
    calls = calls_of(request)
    return RecordedAnswers(Conversations(service(request, Database)), calls.remembered, calls.models)


async def _find(request: Request, response_id: str) -> RecordedTurn:
    turn = await _recorded(request).find(await principal(request), response_id)
    if turn is None:
        raise NotFound(f"there is no response {response_id!r} that this key can see", param="response_id")
    return turn


async def _referenced(recorded: RecordedAnswers, who: Principal, item_ids: Sequence[str]) -> dict[str, Item]:
    """Return the items that exist and that the key may see, by id."""
    found: dict[str, Item] = {}
    for turn_id in dict.fromkeys(turn_of_part(item_id) for item_id in item_ids):
        turn = await recorded.find(who, turn_id) if turn_id is not None else None
        if turn is not None:
            choice = answer_of(turn.response).choices[0]
            items = output_items(turn.id, choice, special_tools(turn.request.get("tools")))
            found.update({item["id"]: item for item in items})
    return found


async def _go_on(recorded: RecordedAnswers, who: Principal, call: ModelCall, previous: PreviousAnswer) -> ModelCall:
    """Return `call` with the conversation up to its previous response, without the instructions of that response.

    Raise PreviousResponseNotFound.
    """
    turn = await recorded.find(who, previous.turn_id)
    if turn is None or turn.state is TurnState.FAILED:
        raise PreviousResponseNotFound(
            f"there is no response {previous.turn_id!r} that this key could go on from", param="previous_response_id"
        )
    before = await recorded.answered(turn)
    theirs = int(_begins_with_instructions(turn.request, before))
    own = int(_begins_with_instructions(call.body, call.messages))
    messages: list[dict[str, Any]]
    if call.messages[:own] == before[:theirs]:
        messages = RememberedMessages([*before, *call.messages[own:]], start=before.start, known=before.known)
    else:
        messages = [*call.messages[:own], *before[theirs:], *call.messages[own:]]
    return msgspec.structs.replace(call, messages=messages, previous=PreviousAnswer(turn_id=turn.id))


def _begins_with_instructions(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    instructions = body.get("instructions")
    return bool(instructions and messages) and messages[0] == {"role": "system", "content": instructions}


def _as_recorded(turn: RecordedTurn) -> dict[str, Any]:
    """Return the turn of any dialect as a response."""
    body = dict(turn.request)
    body["tools"] = [_flat(tool) for tool in body.get("tools") or ()]
    response = recorded_response(body, answer_of(turn.response))
    if turn.state is TurnState.FAILED:
        error = {"code": "server_error", "message": "the engine failed while it generated this response"}
        response |= {"status": "failed", "error": error, "incomplete_details": None}
    return response


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of chat completions in the form of the Responses API."""
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, dict) else tool


def _page(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that `query` asks for. Raise InvalidRequest for an invalid query."""
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc", param="order")
    limit = query.get("limit", str(_LISTED))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= _MOST_LISTED:
        raise InvalidRequest(f"limit is from 1 to {_MOST_LISTED}", param="limit")
    if query.get("order", "desc") == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        positions = [position for position, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise InvalidRequest(f"there is no item {after!r}", param="after")
        items = items[positions[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
