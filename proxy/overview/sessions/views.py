"""Views of sessions and turns. Frozen, JSON by field name.

Later releases may add fields, but never rename or remove one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.turn import VersionSpan
from proxy.lifecycle.texts import FeedbackEntry
from proxy.overview.rewards.views import PreferenceView, RewardItem


class SessionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A session in a list.

    `reward` is the current combined reward, `group` the group's name. `explanation` is a sentence on why the session
    is trained or not. An erased session has no client's name, task or texts.
    """

    id: str
    run_id: str
    external_id: str | None
    attempt: int | None
    task: str | None
    group_id: str | None
    group: str | None
    purpose: str
    state: str
    training: str
    explanation: str
    outcome: str | None
    end_reason: str | None
    attributed_by: str
    turn_count: int
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    consumed_by: int | None
    revised_at: float | None
    created_at: float
    last_active_at: float
    ended_at: float | None
    erased_at: float | None = None
    erased_reason: str | None = None


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids and log-probabilities of a turn. `output_texts` has one text per output id; None if the proxy cannot
    decode them."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_texts: tuple[str, ...] | None


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A model call with its text.

    `messages` are those that the call added; `answer` is the returned message, None if the call failed before there
    was one. `prefix_tokens` of the `prompt_tokens` are shared with the parent. `attributed_by` is the rule that
    assigned the call to its session. `tokens` is present only on request. `masked` are the redacted spans
    [start, end) over the turn's own prompt ids followed by its output ids. `failure` is the known cause of a failed
    call, with the engine's name.
    """

    id: str
    session_id: str
    run_id: str
    ordinal: int
    parent_id: str | None
    state: str
    attributed_by: str
    continuation: str
    finish_reason: str
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    spans: tuple[VersionSpan, ...]
    sampling: dict[str, Any]
    mean_logprob: float | None
    started_at: float
    first_token_at: float | None
    finished_at: float
    messages: tuple[dict[str, Any], ...]
    answer: dict[str, Any] | None
    request: dict[str, Any]
    tokens: TurnTokens | None
    masked: tuple[tuple[int, int], ...] = ()
    failure: str | None = None


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The reward that a session was trained on, beside its current one. `revised`: the reward of the session or of
    one of its turns has changed since."""

    version: int
    claim_id: str | None
    reward_then: float | None
    reward_now: float | None
    revised: bool


class Trainability(msgspec.Struct, frozen=True, kw_only=True):
    """The training state of a session, and a sentence on what would change it."""

    state: str
    explanation: str


class JudgementView(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a judge at the session or at one of its turns. Without `reward_id` and `error`, the judge said
    that it cannot tell. The rationale is the reward's comment."""

    judge: str
    fingerprint: str
    turn_id: str | None
    reward_id: str | None
    score: float | None
    spread: float | None
    votes: tuple[float, ...]
    invalid_votes: int
    is_cut: bool
    error: str | None
    created_at: float


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session, with turns, rewards, texts (`feedback`) and judgements in order of arrival.
    `untrained_turns` maps the ids of turns that are not trained to the reasons."""

    session: SessionItem
    run: str
    metadata: dict[str, Any] | None
    trainability: Trainability
    trained: Trained | None
    turns: tuple[TurnView, ...]
    rewards: tuple[RewardItem, ...]
    feedback: tuple[FeedbackEntry, ...]
    preferences: tuple[PreferenceView, ...]
    untrained_turns: dict[str, str] = {}
    judgements: tuple[JudgementView, ...] = ()


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of sessions, newest first; the last page has no `next_cursor`. A page of a filtered list may be short or
    empty without being the last."""

    sessions: tuple[SessionItem, ...]
    next_cursor: str | None
