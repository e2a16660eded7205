"""Identifiers: a prefix that names the kind of thing, then 26 characters that sort by time of creation."""

from __future__ import annotations

import os
import re
import time
from base64 import b32encode
from typing import Any, NewType

RunId = NewType("RunId", str)
SessionId = NewType("SessionId", str)
GroupId = NewType("GroupId", str)
TurnId = NewType("TurnId", str)
RewardId = NewType("RewardId", str)
PreferenceId = NewType("PreferenceId", str)
TextId = NewType("TextId", str)
ClaimId = NewType("ClaimId", str)
KeyId = NewType("KeyId", str)
EngineId = NewType("EngineId", str)
JobId = NewType("JobId", str)
ProjectId = NewType("ProjectId", str)
WebhookId = NewType("WebhookId", str)
JudgementId = NewType("JudgementId", str)
HoldId = NewType("HoldId", str)
PairId = NewType("PairId", str)

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_TIME_BITS = 48
# Ten characters of five bits hold the time; 16 random ones follow.
_TIME_CHARACTERS = 10
_RANDOM_CHARACTERS = 16
_RANDOM_BYTES = 10
# Random parts fetched at once: every system call lets other threads run first.
_FETCHED = 256
# The alphabet of `b32encode`, in the order of ours.
_TO_ALPHABET = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET.encode())
_SESSION_ID = re.compile(f"ses_[{_ALPHABET}]{{26}}")
_PART_OF_A_TURN = re.compile(rf"(?:call|msg|rs|fc|ctc|turn)_([{_ALPHABET}]{{26}})(?:_\d+)?(?:_verbatim)?")


class _Randomness:
    """Random characters from the system, fetched for many identifiers at once. A forked process discards its copy, so
    that two processes never use the same characters."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        os.register_at_fork(after_in_child=self._parts.clear)

    def take(self) -> str:
        try:
            return self._parts.pop()
        except IndexError:
            text = b32encode(os.urandom(_RANDOM_BYTES * _FETCHED)).translate(_TO_ALPHABET).decode()
            parts = [text[at : at + _RANDOM_CHARACTERS] for at in range(0, len(text), _RANDOM_CHARACTERS)]
            self._parts += parts[1:]
            return parts[0]


_RANDOMNESS = _Randomness()


def _time_text(milliseconds: int) -> str:
    # Without a loop: three identifiers are made for every call.
    first, second = _PAIRS[milliseconds >> 40 & 1023], _PAIRS[milliseconds >> 30 & 1023]
    third, fourth = _PAIRS[milliseconds >> 20 & 1023], _PAIRS[milliseconds >> 10 & 1023]
    return f"{first}{second}{third}{fourth}{_PAIRS[milliseconds & 1023]}"


def _new(prefix: str) -> str:
    milliseconds = int(time.time() * 1000) & ((1 << _TIME_BITS) - 1)
    return f"{prefix}_{_time_text(milliseconds)}{_RANDOMNESS.take()}"


def new_run_id() -> RunId:
    return RunId(_new("run"))


def new_session_id() -> SessionId:
    return SessionId(_new("ses"))


def is_session_id(name: str) -> bool:
    """Return whether a name has the form of our session ids, so that it can only be one."""
    return _SESSION_ID.fullmatch(name) is not None


def new_hold_id() -> HoldId:
    return HoldId(_new("hold"))


def new_pair_id() -> PairId:
    return PairId(_new("pair"))


def new_group_id() -> GroupId:
    return GroupId(_new("grp"))


def new_turn_id() -> TurnId:
    return TurnId(_new("turn"))


def part_id(kind: str, turn_id: str, number: int | None = None) -> str:
    """Return an id for a part of a turn's answer, such as its second tool call (`call`), that contains the turn's id.

    Clients send these ids back, so that `turn_of_part` finds the turn without a table. They have at most 40
    characters of [a-z0-9_], which every provider's clients accept.
    """
    own = f"{kind}_{turn_id.removeprefix('turn_')}"
    return own if number is None else f"{own}_{number}"


def turn_of_part(identifier: Any) -> TurnId | None:
    """Return the turn's id in `identifier`, a turn's id itself or that of a part of its answer; None for any other
    value. The turn need not exist: anybody can write an id of this form."""
    found = _PART_OF_A_TURN.fullmatch(identifier) if isinstance(identifier, str) else None
    return TurnId(f"turn_{found[1]}") if found else None


def least_turn_id(created_at: float) -> TurnId:
    """Return the least id of a turn that was made at `created_at` (seconds since the epoch) or later."""
    milliseconds = max(0, int(created_at * 1000))
    return TurnId(f"turn_{_time_text(milliseconds)}{_ALPHABET[0] * _RANDOM_CHARACTERS}")


def created_at(identifier: str) -> float:
    """Return when an identifier was made, in seconds since the epoch. Identifiers sort by this time."""
    number = 0
    for character in identifier.rpartition("_")[2][:_TIME_CHARACTERS]:
        number = number << 5 | _ALPHABET.index(character)
    return number / 1000


def new_reward_id() -> RewardId:
    return RewardId(_new("rwd"))


def new_preference_id() -> PreferenceId:
    return PreferenceId(_new("prf"))


def new_text_id() -> TextId:
    return TextId(_new("txt"))


def new_claim_id() -> ClaimId:
    return ClaimId(_new("clm"))


def new_key_id() -> KeyId:
    return KeyId(_new("key"))


def new_engine_id() -> EngineId:
    return EngineId(_new("eng"))


def new_job_id() -> JobId:
    return JobId(_new("job"))


def new_project_id() -> ProjectId:
    return ProjectId(_new("prj"))


def new_webhook_id() -> WebhookId:
    return WebhookId(_new("whk"))


def new_judgement_id() -> JudgementId:
    return JudgementId(_new("jdg"))


def new_request_id() -> str:
    return _new("req")
