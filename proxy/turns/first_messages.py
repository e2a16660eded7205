"""The first message of a user, as a hash by which sessions with the same question are recognised. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from proxy.tokens.canonical import HASH_BYTES


def first_message_of(conversations: Iterable[Sequence[Mapping[str, Any]]]) -> bytes | None:
    """Return the hash for a session that began with the first of these conversations."""
    return next(map(first_message_hash, conversations), None)


def first_message_hash(messages: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Return the hash of the first message with the role `user`; None if there is none, or if it is empty.

    White space around a text does not count. Of content in parts every part counts, because the same words may be
    about another image.
    """
    content = next((message.get("content") for message in messages if message.get("role") == "user"), None)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            content = "".join(texts)
    if isinstance(content, str):
        content = content.strip()
    if not content:
        return None
    plain = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return blake2b(plain.encode(), digest_size=HASH_BYTES).digest()
