"""Conversations that grow by a question and an answer at every turn, as complete HTTP requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import msgspec

from proxy.engines.scripted.script import MODEL
from proxy.tokens.template import ChatTemplate

MODEL_NAME = "policy"
ANSWER = "The sum is forty-two; I added the tens first and the ones after them."
"""The answer of the scripted engine and of the stub to every question."""
SYSTEM = (
    "You are a careful assistant for arithmetic. Work step by step, keep your answers short, and say how you came to "
    "the result. Where a question is unclear, ask back instead of guessing."
)
SHORT_TURNS = 3
LONG_TURNS = 50
MAX_TOKENS = 64
_conversations = itertools.count(1)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def question(conversation: int, turn: int) -> str:
    """Return a question whose first words differ between conversations, so that no two share a prefix."""
    return f"Task {conversation}, part {turn}: what is {conversation % 89} plus {turn}, and how do you get there?"


def post(path: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def bodies(conversation: int, turns: int, *, stream: bool) -> Iterator[bytes]:
    """Return the bodies for `/v1/chat/completions` of one conversation."""
    rest: dict[str, object] = {"max_tokens": MAX_TOKENS, "temperature": 1.0}
    if stream:
        rest["stream"] = True
    end = b"]," + _json(rest)[1:]
    answer = b"," + _json({"role": "assistant", "content": ANSWER}) + b","
    text = (
        b'{"model":"' + MODEL_NAME.encode() + b'","messages":[' + _json({"role": "system", "content": SYSTEM}) + b","
    )
    for turn in range(1, turns + 1):
        text += _json({"role": "user", "content": question(conversation, turn)})
        yield text + end
        text += answer


def chats(path: str, *, turns: int, stream: bool = False, headers: str = "") -> Iterator[bytes]:
    """Yield conversations of `turns` turns, one after another, as requests to `path`, in which `{}` is the session's
    name."""
    while True:
        conversation = next(_conversations)
        address = path.format(f"s{conversation}")
        for body in bodies(conversation, turns, stream=stream):
            yield post(address, body, headers)


def generations(*, turns: int, stream: bool = False) -> Iterator[bytes]:
    """Yield the engine requests of the same conversations, with token ids."""
    return itertools.cycle(_generations(turns, stream))


@cache
def _generations(turns: int, stream: bool) -> tuple[bytes, ...]:
    template = ChatTemplate.load(str(MODEL))
    messages = [{"role": "system", "content": SYSTEM}]
    requests = []
    for turn in range(1, turns + 1):
        messages.append({"role": "user", "content": question(0, turn)})
        body = {
            "rid": f"direct-{turn}/",
            "input_ids": template.encode(template.render(messages, None, generation_prompt=True)),
            "sampling_params": {"max_new_tokens": MAX_TOKENS, "temperature": 1.0},
            "return_logprob": True,
            "stream": stream,
        }
        requests.append(post("/generate", _json(body)))
        messages.append({"role": "assistant", "content": ANSWER})
    return tuple(requests)
