"""Rewards, texts and preferences over HTTP."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from proxy.auth.http import principal
from proxy.contract.reward import DEFAULT_NAME, DEFAULT_SOURCE
from proxy.errors import InvalidRequest
from proxy.feedback.preferences import PreferenceItem
from proxy.feedback.service import Effect, FeedbackItem, FeedbackService
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service

router = APIRouter(tags=["feedback"])

# Bound of a reward's magnitude: sums of many rewards stay finite, even in float32.
LARGEST_REWARD = 1e12

# Bounds of one request, whose items are written in one transaction.
_MOST_ITEMS = 1024
_MOST_COMPONENTS = 64

_NOTHING = "give a reward, components or a text"
_COMMENT_ALONE = "a comment explains a reward or components: to record words alone, send them as `text`"


def reward_value(value: Any) -> float:
    """Convert a JSON number or boolean to a reward; true is 1, false is 0. Raise PydanticCustomError, a
    ValueError."""
    if not isinstance(value, bool | int | float):
        raise PydanticCustomError("reward", "a reward must be a number or a boolean")
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("reward", "a reward must be a finite number")
    if abs(value) > LARGEST_REWARD:
        raise PydanticCustomError("reward", "a reward's magnitude must be at most 1e12")
    return float(value)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("use printable characters only")
    return value


def _legible(value: str) -> str:
    if not value.strip():
        raise ValueError("write something: this text is blank")
    if "\0" in value:
        raise ValueError("leave out the characters \\u0000, which cannot be stored")
    return value


RewardValue = Annotated[float, BeforeValidator(reward_value)]
Label = Annotated[StrictStr, Field(min_length=1, max_length=128), AfterValidator(_printable)]
Key = Annotated[StrictStr, Field(min_length=1, max_length=200), AfterValidator(_printable)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]
Comment = Annotated[StrictStr, Field(max_length=16384)]
FeedbackText = Annotated[StrictStr, Field(min_length=1, max_length=16384), AfterValidator(_legible)]


class FeedbackBody(BaseModel):
    """A reward for a session or a turn, a text about it, or both.

    `text` says in words what was good or bad, and what would have been better. `comment` explains a reward to people.
    Each of `components` becomes a ledger entry under its own name, beside `reward`. The run's `reward_weights` and
    `rewards` define how all names combine to one reward; a name without a weight has weight 1, so set weight 0 for a
    component that is only informative. `run`, a name or an id, is required if an admin key names a session by the
    client's own name.
    """

    model_config = ConfigDict(extra="forbid")

    reward: RewardValue | None = None
    session_id: Name | None = None
    turn_id: Name | None = None
    completion_id: Name | None = None
    run: Name | None = None
    name: Label = DEFAULT_NAME
    components: Annotated[dict[Label, RewardValue], Field(max_length=_MOST_COMPONENTS)] | None = None
    comment: Comment | None = None
    text: FeedbackText | None = None
    source: Label = DEFAULT_SOURCE
    final: StrictBool | None = None
    idempotency_key: Key | None = None


def feedback_of(request: Request) -> FeedbackService:
    return service(request, FeedbackService)


class PreferenceBody(BaseModel):
    """A statement that `chosen` is better than `rejected`; each is a session's id or name, or a turn's id. `run` is
    required as for a reward."""

    model_config = ConfigDict(extra="forbid")

    chosen: Name
    rejected: Name
    run: Name | None = None
    source: Label = DEFAULT_SOURCE
    comment: Comment | None = None
    idempotency_key: Key | None = None


_DESCRIBED = described(
    FeedbackBody,
    answers={201: "Recorded.", 202: "Recorded, but at least one session had already been claimed for training."},
    may_be_list=True,
)


@router.post("/sessions/{session_id}/v1/feedback", status_code=201, include_in_schema=False)
@router.post("/sessions/{session_id}/feedback", status_code=201, include_in_schema=False)
@router.post("/v1/feedback", status_code=201, openapi_extra=_DESCRIBED)
@router.post("/feedback", status_code=201, include_in_schema=False)
async def post_feedback(request: Request) -> JSONResponse:
    """Record one item of feedback, or a list of them in one transaction. A session in the path is for items that name
    none.

    The status is 201, or 202 if a trainer had already claimed one of the sessions (`recorded_after_training`).
    """
    who = await principal(request)
    session_id = request.path_params.get("session_id")
    body = await json_body(request)
    if not isinstance(body, list):
        items = [_item(validated(FeedbackBody, body), "", session_id)]
    elif 0 < len(body) <= _MOST_ITEMS:
        items = [
            _item(validated(FeedbackBody, value, within=f"[{index}]"), f"[{index}].", session_id)
            for index, value in enumerate(body)
        ]
    else:
        raise InvalidRequest(f"a list must have 1 to {_MOST_ITEMS} items")
    receipts = await feedback_of(request).record(who, items)
    late = any(receipt.effect is Effect.RECORDED_AFTER_TRAINING for receipt in receipts)
    answers = [msgspec.to_builtins(receipt) for receipt in receipts]
    return JSONResponse({"results": answers} if isinstance(body, list) else answers[0], 202 if late else 201)


@router.post(
    "/v1/feedback/preference",
    status_code=201,
    openapi_extra=described(PreferenceBody, answers={201: "Recorded."}),
)
@router.post("/feedback/preference", status_code=201, include_in_schema=False)
async def post_preference(request: Request) -> JSONResponse:
    """Record a preference, which both sessions show. It is no reward: it neither ends a session nor trains it."""
    who = await principal(request)
    body = validated(PreferenceBody, await json_body(request))
    item = PreferenceItem(
        chosen=body.chosen,
        rejected=body.rejected,
        run=body.run,
        source=body.source,
        comment=body.comment,
        idempotency_key=body.idempotency_key,
    )
    receipt = await feedback_of(request).prefer(who, item)
    return JSONResponse(msgspec.to_builtins(receipt), 201)


def _item(body: FeedbackBody, within: str, path_session: str | None) -> FeedbackItem:
    entries = [] if body.reward is None else [(body.name, body.reward)]
    entries += (body.components or {}).items()
    if not entries and (body.text is None or body.comment is not None):
        raise InvalidRequest(_NOTHING if body.comment is None else _COMMENT_ALONE, param=f"{within}reward")
    if len({name for name, _ in entries}) != len(entries):
        raise InvalidRequest(f"{body.name!r} names both the reward and a component", param=f"{within}components")
    if None not in (body.turn_id, body.completion_id) and body.turn_id != body.completion_id:
        raise InvalidRequest("turn_id and completion_id name different turns", param=f"{within}completion_id")
    turn = body.turn_id if body.turn_id is not None else body.completion_id
    return FeedbackItem(
        entries=tuple(entries),
        session_id=body.session_id or (path_session if turn is None else None),
        turn_id=turn,
        run=body.run,
        source=body.source,
        comment=body.comment,
        text=body.text,
        final=body.final,
        idempotency_key=body.idempotency_key,
    )
