"""Write models, and pages of them, in the wire format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from proxy.dialects.listing import ListedModel
from proxy.errors import InvalidRequest
from proxy.http.body import validated

HEADER = "anthropic-version"
"""The header by which Anthropic's clients are recognised: both APIs list models at the same path."""


class _Query(BaseModel):
    limit: int = Field(default=20, ge=1, le=1000)
    after_id: str | None = None
    before_id: str | None = None


def model_info(model: ListedModel) -> dict[str, Any]:
    """Return a model in Anthropic's form."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
    }


def page(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `models` that `query` asks for. Raise InvalidRequest if the query is invalid."""
    asked = validated(_Query, dict(query))
    ids = [model.name for model in models]
    start, end = 0, len(ids)
    if asked.after_id is not None:
        start = _position(ids, asked.after_id, "after_id") + 1
    if asked.before_id is not None:
        end = _position(ids, asked.before_id, "before_id")
        start = max(start, end - asked.limit)
    shown = range(start, min(end, start + asked.limit))
    # "More" lies in the direction of paging: before the page with `before_id`, after it otherwise.
    has_more = start > 0 if asked.before_id is not None else shown.stop < end
    return {
        "data": [model_info(models[index]) for index in shown],
        "has_more": has_more,
        "first_id": ids[shown[0]] if shown else None,
        "last_id": ids[shown[-1]] if shown else None,
    }


def _position(ids: Sequence[str], model: str, param: str) -> int:
    if model not in ids:
        raise InvalidRequest(f"there is no model {model!r} in the list: take an id from another page", param=param)
    return ids.index(model)
