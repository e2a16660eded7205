"""What is asked: conversations that grow by a question and an answer at every turn, as requests ready to be sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import msgspec

from proxy.engines.scripted.script import MODEL
from proxy.tokens.template import ChatTemplate

MODEL_NAME = "policy"
ANSWER = "The sum is forty-two; I added the tens first and the ones after them."
"""What scripted engine and stub say to everything."""
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
    """Differs between conversations in its first words, so that no two begin alike."""
    return f"Task {conversation}, part {turn}: what is {conversation % 89} plus {turn}, and how do you get there?"


def post(path: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def bodies(conversation: int, turns: int, *, stream: bool) -> Iterator[bytes]:
    """The bodies of `/v1/chat/completions` over one conversation."""
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
    """Conversations of so many turns, one after another, as requests to `path`, in which `{}` names the session."""
    while True:
        conversation = next(_conversations)
        address = path.format(f"s{conversation}")
        for body in bodies(conversation, turns, stream=stream):
            yield post(address, body, headers)


def generations(*, turns: int, stream: bool = False) -> Iterator[bytes]:
    """What the engine would be asked in those conversations, with the token ids at hand."""
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
