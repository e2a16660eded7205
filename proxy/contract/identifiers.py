"""Identifiers: a prefix that says what the thing is, then 26 characters that sort by time of creation."""

from __future__ import annotations

import secrets
import time
from typing import NewType

RunId = NewType("RunId", str)
SessionId = NewType("SessionId", str)
GroupId = NewType("GroupId", str)
TurnId = NewType("TurnId", str)
RewardId = NewType("RewardId", str)
ClaimId = NewType("ClaimId", str)
KeyId = NewType("KeyId", str)

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_BITS = 48
_RANDOM_BITS = 80
_LENGTH = 26


def _encode(number: int) -> str:
    characters = []
    for _ in range(_LENGTH):
        characters.append(_ALPHABET[number & 31])
        number >>= 5
    return "".join(reversed(characters))


def _new(prefix: str) -> str:
    milliseconds = int(time.time() * 1000) & ((1 << _TIME_BITS) - 1)
    return f"{prefix}_{_encode((milliseconds << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS))}"


def new_run_id() -> RunId:
    return RunId(_new("run"))


def new_session_id() -> SessionId:
    return SessionId(_new("ses"))


def new_group_id() -> GroupId:
    return GroupId(_new("grp"))


def new_turn_id() -> TurnId:
    return TurnId(_new("turn"))


def new_reward_id() -> RewardId:
    return RewardId(_new("rwd"))


def new_claim_id() -> ClaimId:
    return ClaimId(_new("clm"))


def new_key_id() -> KeyId:
    return KeyId(_new("key"))
