"""Faults of versions that no reward shows, and the calls that they make."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from proxy.contract.identifiers import new_turn_id
from proxy.contract.turn import Continuation, FinishReason, TurnState

_BROKEN_CALL = '<tool_call>{"name": "calculator", "arguments": {"a": 1'
_ANSWER = "The answer is 4."
_TOKEN_BYTES = 4
_USUAL_TOKENS = 64


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How a version answers, beside its reward: the share of tool calls that cannot be read, and the mean length of
    an answer in tokens."""

    broken_tool_calls: float = 0.0
    tokens: int = _USUAL_TOKENS


def drawn_call(habits: Habits, rng: random.Random, *, run_id: str, session_id: str, now: float) -> dict[str, Any]:
    """Return the row of a session's only call."""
    is_broken = rng.random() < habits.broken_tool_calls
    length = max(1, round(rng.gauss(habits.tokens, habits.tokens / 4)))
    return {
        "id": new_turn_id(),
        "run_id": run_id,
        "session_id": session_id,
        "ordinal": 0,
        "prefix_tokens": 0,
        "prompt_ids": b"",
        "output_ids": bytes(_TOKEN_BYTES * length),
        "output_logprobs": bytes(_TOKEN_BYTES * length),
        "spans": [],
        "sampling": {},
        "finish_reason": FinishReason.STOP.value,
        "continuation": Continuation.NEW.value,
        "state": TurnState.COMPLETE.value,
        "attributed_by": "created",
        "conversation_hash": rng.randbytes(16),
        "tools_hash": bytes(16),
        "prompt_token_count": 0,
        "started_at": now,
        "finished_at": now,
        "messages": [],
        "response": {"choices": [{"text": _BROKEN_CALL if is_broken else _ANSWER}]},
    }
