"""Results of a version at a suite of tasks, as requests and evaluators' answers give them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints

from proxy.contract.policy import MAX_VERSION
from proxy.settings import RewardNumber

_MOST_RESULTS = 1000


class ResultBody(BaseModel):
    """The reward of one attempt at a task."""

    model_config = ConfigDict(extra="forbid")

    task: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    reward: RewardNumber
    attempt: Annotated[StrictInt, Field(ge=0, le=MAX_VERSION)] = 0
    session_id: Annotated[str, StringConstraints(max_length=40)] | None = None


class ResultsBody(BaseModel):
    """Results of a version at a suite of tasks."""

    model_config = ConfigDict(extra="forbid")

    results: Annotated[list[ResultBody], Field(min_length=1, max_length=_MOST_RESULTS)]
