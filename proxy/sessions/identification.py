"""The rules that identify the session of a model call, and the hints that they read from it.

There are ten rules, and the first that applies decides. Rules 1, 3, 4, 6, 7, 8 and 10 find a name, and a run has one
namespace: `x` in a header and `x` in `metadata.session_id` name the same session. A session is one attempt; its name
may be used again for the next attempt (`opening.py`).

     1  path              /sessions/{id}/v1/…
     2  key               a session's own key
     3  header            X-Base-RL-Session
     4  agent_header      headers that agents send anyway: Codex, OpenCode, Claude Code
     5  answer_id         our ids that the call sends back: of tool calls, items, responses (`previous_response`)
     6  prompt_cache_key  of the body
     7  metadata          metadata.session_id; the session in metadata.user_id, as Claude Code writes it
     8  project           OpenAI-Project
     9  conversation      a recorded conversation that the messages extend, or that the only user message holds
    10  traceparent       its trace id; otherwise `new`

`user` names a person, who makes many attempts, so it never names a session. The path and our own headers are
addressed to us, so an invalid value in them is an error. The other fields are not, so a value that cannot be a name
is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from proxy.contract.identifiers import GroupId, KeyId, RunId, SessionId, TurnId, new_session_id
from proxy.contract.trajectory import Purpose
from proxy.errors import InvalidRequest
from proxy.sessions.growing import LonePrompt

_NAME_LENGTH = 200
# Longer values of fields that are not addressed to us are ignored without parsing: bounds the cost of a call.
_FOREIGN_LENGTH = 2000


class AttributedBy(StrEnum):
    """The rule that attributed a call to its session, or the origin of a session."""

    CREATED = "created"
    PATH = "path"
    KEY = "key"
    HEADER = "header"
    AGENT_HEADER = "agent_header"
    PREVIOUS_RESPONSE = "previous_response"
    ANSWER_ID = "answer_id"
    PROMPT_CACHE_KEY = "prompt_cache_key"
    METADATA = "metadata"
    PROJECT = "project"
    TRACEPARENT = "traceparent"
    USER = "user"
    """In older stores only: `user` used to name sessions."""
    CONVERSATION = "conversation"
    NEW = "new"
    IMPORT = "import"

    @property
    def outlives_sessions(self) -> bool:
        """Whether clients use the rule's names beyond one attempt, such as a cache key or a project.

        After the end of its session, such a name opens the next attempt even for a call that continues a
        conversation.
        """
        return self in _OUTLIVING

    @property
    def meaning(self) -> str:
        """An explanation of the rule in a sentence, for people."""
        return _MEANINGS[self]


_OUTLIVING = frozenset(
    {
        AttributedBy.PROMPT_CACHE_KEY,
        AttributedBy.METADATA,
        AttributedBy.PROJECT,
        AttributedBy.TRACEPARENT,
    }
)

_MEANINGS = {
    AttributedBy.CREATED: "Opened by POST /v1/sessions.",
    AttributedBy.PATH: "Named by the address: /sessions/NAME/v1.",
    AttributedBy.KEY: "Sent with the session's own API key.",
    AttributedBy.HEADER: "Named by the header X-Base-RL-Session.",
    AttributedBy.AGENT_HEADER: "Named by a header that the agent sends by itself, such as Codex's session-id.",
    AttributedBy.PREVIOUS_RESPONSE: "Went on from a response of this session by previous_response_id.",
    AttributedBy.ANSWER_ID: "Sent back the id of a tool call or item of this session's answers.",
    AttributedBy.PROMPT_CACHE_KEY: "Named by prompt_cache_key in the request.",
    AttributedBy.METADATA: "Named by metadata.session_id, or by the session in Claude Code's metadata.user_id.",
    AttributedBy.PROJECT: "Named by the header OpenAI-Project (OPENAI_PROJECT_ID).",
    AttributedBy.TRACEPARENT: "Named by the trace id in the header traceparent.",
    AttributedBy.USER: "Named by user in the request, which names no sessions any more.",
    AttributedBy.CONVERSATION: "Named nothing: the messages extend a conversation of this session.",
    AttributedBy.IMPORT: "Imported from a file.",
    AttributedBy.NEW: "Named nothing and extended no conversation, so it opened a session of its own.",
}


class Name(msgspec.Struct, frozen=True):
    """A session's name, and the rule that found it."""

    by: AttributedBy
    text: str


class SessionHints(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a call that may identify its session.

    - `path`, and the text of `named`: our session id or the client's own name. `named` is the result of the first of
      the rules 3, 4, 6, 7 and 8 that applies.
    - `turns`: the turns whose ids the call sends back, newest first. With `by_previous` the first of them is its
      `previous_response_id`.
    - `conversation_hashes`: the hashes of its conversation up to each of its answers, longest first.
    - `lone_prompt`: its only message, if it is a user message.
    - `trace`: the trace id. `group`: the group of a session that the call opens.
    - `repeats`: returns whether this very request was answered in a session before. `idempotency_key`: the client's
      own mark of a repeated request.
    """

    path: str | None = None
    named: Name | None = None
    turns: Sequence[TurnId] = ()
    by_previous: bool = False
    conversation_hashes: Sequence[bytes] = ()
    lone_prompt: LonePrompt | None = None
    trace: str | None = None
    group: str | None = None
    idempotency_key: str | None = None
    repeats: Callable[[SessionId], bool] | None = None

    @property
    def name(self) -> str | None:
        """The name that takes precedence over the conversation, if there is one."""
        return self.path if self.path is not None or self.named is None else self.named.text


class SessionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a call.

    `key_id` is the run key whose call opened it. `attempt` is its number among the sessions of its name, None without
    a name. The other fields may differ between calls of one session:

    - `attributed_by`: the rule that found it.
    - `has_ended`: it had ended before the call, so the call is not trained.
    - `is_new`: this very call opened it.
    - `continues`: the hash by which rule 9 found it, of the conversation or of the prompt with its answer.
    """

    id: SessionId
    run_id: RunId
    purpose: Purpose
    attributed_by: AttributedBy
    group_id: GroupId | None
    key_id: KeyId | None = None
    attempt: int | None = None
    has_ended: bool = False
    is_new: bool = False
    continues: bytes | None = None


def unrecorded_session(run_id: RunId) -> SessionContext:
    """Return a session without a row, for a call that is served while the store is unavailable.

    Its purpose is `eval`: it is not trained, so the client's sampling is left unchanged.
    """
    return SessionContext(
        id=new_session_id(),
        run_id=run_id,
        purpose=Purpose.EVAL,
        attributed_by=AttributedBy.NEW,
        group_id=None,
        is_new=True,
    )


def checked_name(name: str, *, param: str) -> str:
    """Return `name` if it can name a session or group. Raise InvalidRequest otherwise."""
    if not _is_name(name):
        raise InvalidRequest(f"{param} is 1 to {_NAME_LENGTH} printable characters", param=param)
    return name


OWN_HEADER = "x-base-rl-session"
GROUP_HEADER = "x-base-rl-group"

_AGENT_HEADERS = (
    "session-id",  # Codex: shared by its sub-agents, whose thread-id differs
    "session_id",  # older versions of Codex
    "thread-id",
    "thread_id",
    "x-session-id",  # OpenCode, to providers other than its own
    "x-session-affinity",
    "x-opencode-session",  # OpenCode, to providers whose id begins with opencode
    "x-claude-code-session-id",
)

_HEADERS = {
    name.encode(): name for name in (OWN_HEADER, GROUP_HEADER, *_AGENT_HEADERS, "openai-project", "traceparent")
}


# The fields of a body that rules read; in `user`, only the session that gateways write into it.
_BODY_FIELDS = frozenset({"metadata", "prompt_cache_key", "user"})


def session_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers that the rules read. `raw` are all headers of a request, names in lower case as in ASGI."""
    found: dict[str, str] = {}
    for key, value in raw:
        name = _HEADERS.get(key)
        if name is not None:
            found.setdefault(name, value.decode("latin-1"))
    return found


def session_hints(
    *,
    path: str | None,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    conversation_hashes: tuple[bytes, ...] = (),
) -> SessionHints:
    """Read the hints of a call in any dialect. Raise InvalidRequest if the path or one of our headers has a value
    that cannot be a name."""
    if path is not None:
        checked_name(path, param="session_id")
    if not headers and _BODY_FIELDS.isdisjoint(body):
        return SessionHints(path=path, conversation_hashes=conversation_hashes)
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        metadata = {}
    group = headers.get(GROUP_HEADER)
    return SessionHints(
        path=path,
        named=_named(headers, body, metadata),
        group=_usable(metadata.get("group")) if group is None else checked_name(group, param="X-Base-RL-Group"),
        conversation_hashes=conversation_hashes,
        trace=trace_id(headers.get("traceparent")),
    )


def _named(headers: Mapping[str, str], body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Name | None:
    """Apply rules 3, 4, 6, 7 and 8."""
    own = headers.get(OWN_HEADER)
    if own is not None:
        return Name(AttributedBy.HEADER, checked_name(own, param="X-Base-RL-Session"))
    for by, value in _foreign(headers, body, metadata):
        name = None if value is None else _usable(value)
        if name is not None:
            return Name(by, name)
    return None


def _foreign(
    headers: Mapping[str, str], body: Mapping[str, Any], metadata: Mapping[str, Any]
) -> Iterable[tuple[AttributedBy, Any]]:
    """Yield the values of the rules 4, 6, 7 and 8, in this order."""
    if headers:
        for header in _AGENT_HEADERS:
            yield AttributedBy.AGENT_HEADER, headers.get(header)
    yield AttributedBy.PROMPT_CACHE_KEY, body.get("prompt_cache_key")
    yield AttributedBy.METADATA, metadata.get("session_id")
    for user in (metadata.get("user_id"), body.get("user")):
        yield AttributedBy.METADATA, claude_code_session(user)
    yield AttributedBy.PROJECT, headers.get("openai-project")


def _usable(value: Any) -> str | None:
    """Return a foreign value as a name, or None if it cannot be one. An integer becomes its decimal text."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    if not isinstance(value, str) or len(value) > _FOREIGN_LENGTH:
        return None
    name = value.strip()
    return name if _is_name(name) else None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _NAME_LENGTH and text.isprintable()


_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id(traceparent: str | None) -> str | None:
    """Return the trace id of a valid W3C `traceparent`.

    Later versions than 00 may have more fields; an id of zeros is invalid.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if found is None or (found[1] == "00" and found[3] is not None):
        return None
    return found[2]


_CLAUDE_CODE_USER = re.compile(r"user_\w+_account_[\w-]*_session_([0-9A-Za-z-]{8,64})")


def claude_code_session(user_id: Any) -> str | None:
    """Return the session in a `metadata.user_id` of Claude Code, or in the `user` that gateways make of it.

    The value is JSON, `{"device_id", "account_uuid", "session_id"}`, since version 2.1.78; before, it was
    `user_<hash>_account_<uuid or nothing>_session_<uuid>`.
    """
    if not isinstance(user_id, str) or len(user_id) > _FOREIGN_LENGTH:
        return None
    if not user_id.startswith("{"):
        found = _CLAUDE_CODE_USER.fullmatch(user_id)
        return found[1] if found else None
    try:
        value = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) else None
