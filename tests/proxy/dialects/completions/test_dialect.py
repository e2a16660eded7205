"""POST /v1/completions: prompts of text and of ids, and prompts that continue earlier completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.contract.arrays import unpack_ids
from proxy.dialects.completions.request import parse_completion
from proxy.errors import InvalidRequest, UnsupportedParameter
from tests.proxy.calls.test_choices import turns_of
from tests.proxy.calls.world import USER, World, output_ids

PATH = "/v1/completions"
ASKED = "Q: 17 + 25?\nA:"


async def post(world: World, body: dict[str, Any], **headers: str) -> Any:
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}
    return await world.http.post(PATH, json={"model": "policy", "prompt": ASKED, **body}, headers=dashed)


async def chunks_of(world: World, **body: Any) -> list[dict[str, Any]]:
    response = await post(world, {"stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def sent(world: World, index: int = -1) -> tuple[int, ...]:
    return tuple(world.engine.requests[index].input_ids)


async def test_a_whole_answer(world: World) -> None:
    world.say(" 42")
    response = await post(world, {})
    turn = (await world.turns())[0]
    assert response.json() == {
        "id": turn.id,
        "object": "text_completion",
        "created": int(world.store.clock()),
        "model": "policy",
        "system_fingerprint": "policy@0",
        "choices": [{"index": 0, "text": " 42", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(world.template.encode(ASKED)),
            "completion_tokens": len(output_ids(turn)),
            "total_tokens": len(world.template.encode(ASKED)) + len(output_ids(turn)),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert response.headers["x-base-rl-turn"] == turn.id
    assert response.headers["x-base-rl-session"] == turn.session_id


async def test_a_text_prompt_is_the_whole_prompt(world: World) -> None:
    await post(world, {})
    assert sent(world) == world.template.encode(ASKED)
    (turn,) = await world.turns()
    assert turn.messages == [{"role": "user", "content": ASKED}]
    assert "prompt" not in turn.request
    assert (turn.continuation, output_ids(turn)) == ("new", world.answers[0])


async def test_ids_are_sent_as_they_are_given(world: World) -> None:
    ids = [token for character in ASKED for token in world.template.encode(character)]
    await post(world, {"prompt": ids})
    assert sent(world) == tuple(ids)
    (turn,) = await world.turns()
    assert unpack_ids(turn.prompt_ids) == tuple(ids)
    assert turn.messages == [{"role": "user", "content": ASKED}]


async def test_max_tokens_is_16_by_default(world: World) -> None:
    world.say("x" * 40)
    assert (await post(world, {})).json()["choices"][0]["finish_reason"] == "length"
    await post(world, {"max_tokens": 32_000})
    bounds = [request.sampling.max_new_tokens for request in world.engine.requests]
    assert bounds == [16, 512 - len(world.template.encode(ASKED))]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_list_of_prompts_has_n_answers_each_in_order(world: World, as_ids: bool) -> None:
    world.say("a", "b", "c", "d")
    prompts: list[Any] = ["First:", "The second:"]
    if as_ids:
        prompts = [list(world.template.encode(prompt)) for prompt in prompts]
    answer = (await post(world, {"prompt": prompts, "n": 2})).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    lengths = [len(world.template.encode(prompt)) for prompt in ("First:", "The second:")]
    assert answer["usage"]["prompt_tokens"] == sum(lengths), "a prompt is counted once"
    turns = await turns_of(world)
    assert [turn.prompt_token_count for turn in turns] == [lengths[0]] * 2 + [lengths[1]] * 2
    assert [choice["turn_id"] for choice in answer["choices"]] == [turn.id for turn in turns]


async def test_echo_repeats_the_prompt(world: World) -> None:
    world.say(" 42")
    for prompt in (ASKED, list(world.template.encode(ASKED))):
        assert (await post(world, {"prompt": prompt, "echo": True})).json()["choices"][0]["text"] == f"{ASKED} 42"
    chunks = await chunks_of(world, echo=True)
    assert chunks[0]["choices"][0]["text"] == ASKED
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"{ASKED} 42"


async def test_a_stream(world: World) -> None:
    chunks = await chunks_of(world, stream_options={"include_usage": True})
    *pieces, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == "The answer is 42."
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert [chunk["usage"] for chunk in pieces] == [None] * len(pieces)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(world.answers[0]))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert not any("usage" in chunk for chunk in await chunks_of(world))


async def test_log_probabilities_in_the_form_of_completions(world: World) -> None:
    world.say("é 42")
    choice = (await post(world, {"logprobs": 2})).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(world.answers[0]) - 1}
    assert set(logprobs["token_logprobs"]) == {-0.5}
    assert logprobs["text_offset"][0] == 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == max(top.values()) == -0.5
        assert len(top) == 2
    streamed = [chunk["choices"][0]["logprobs"] for chunk in await chunks_of(world, logprobs=2)]
    for name, values in logprobs.items():
        assert [value for part in streamed if part for value in part[name]] == values


async def test_no_alternatives_are_written_unless_asked_for(world: World) -> None:
    logprobs = (await post(world, {"logprobs": 0})).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert logprobs["tokens"]


async def test_a_prompt_that_extends_a_completion_continues_with_its_ids(world: World) -> None:
    ids = [token for character in " 42" for token in world.template.encode(character)]
    world.answers[:] = [[*ids, world.template.stop_ids[0]]]
    text = (await post(world, {})).json()["choices"][0]["text"]
    await post(world, {"prompt": f"{ASKED}{text}\nQ: 2 + 2?\nA:"})
    first, second = await world.turns()
    assert (second.session_id, second.parent_id, second.continuation) == (first.session_id, first.id, "exact")
    assert sent(world)[: second.prefix_tokens] == (*world.template.encode(ASKED), *ids)
    assert second.messages == [{"role": "user", "content": "\nQ: 2 + 2?\nA:"}]
    assert [attributed for _, attributed in world.seen.turns] == ["new", "conversation"]


async def test_a_prompt_of_ids_that_extends_a_completion_continues_it(world: World) -> None:
    ids = list(world.template.encode(ASKED))
    await post(world, {"prompt": ids})
    said = world.answers[0][:-1]
    await post(world, {"prompt": [*ids, *said, 5, 6]})
    first, second = await world.turns()
    assert sent(world) == (*ids, *said, 5, 6)
    assert (second.session_id, second.parent_id, second.continuation) == (first.session_id, first.id, "exact")
    assert unpack_ids(second.prompt_ids) == (5, 6)


async def test_an_echoed_stop_string_is_not_tokenised_again(world: World) -> None:
    world.say(" think\nObservation:", stop=False)
    text = (await post(world, {"stop": "\nObservation:"})).json()["choices"][0]["text"]
    assert text == " think"
    await post(world, {"prompt": f"{ASKED}{text}\nObservation: 42\n"})
    first, second = await world.turns()
    assert (second.continuation, second.prefix_tokens) == (
        "exact",
        first.prompt_token_count + len(output_ids(first)),
    )


async def test_equal_prompts_are_distinguished(world: World) -> None:
    world.say("")
    for _ in range(2):
        await post(world, {})
    assert len(await world.sessions()) == 2


async def test_after_a_restart_a_named_session_continues_exactly(world: World) -> None:
    text = (await post(world, {}, x_base_rl_session="job")).json()["choices"][0]["text"]
    world.restart()
    await post(world, {"prompt": f"{ASKED}{text}\n"}, x_base_rl_session="job")
    first, second = await world.turns()
    assert (second.parent_id, second.continuation) == (first.id, "exact")


@pytest.mark.parametrize("as_ids", [False, True])
async def test_after_a_restart_a_completion_is_recognised(world: World, as_ids: bool) -> None:
    asked: Any = list(world.template.encode(ASKED)) if as_ids else ASKED
    text = (await post(world, {"prompt": asked})).json()["choices"][0]["text"]
    world.restart()
    await post(world, {"prompt": [*asked, *world.answers[0][:-1], 5] if as_ids else f"{asked}{text}\n"})
    first, second = await world.turns()
    assert (second.session_id, second.parent_id, second.continuation) == (first.session_id, first.id, "exact")


async def test_an_edited_prompt_is_a_branch(world: World) -> None:
    for prompt in ("The answer to 1 + 1 is", "The answer to 1 + 2 is"):
        await post(world, {"prompt": prompt}, x_base_rl_session="job")
    first, second = await world.turns()
    assert (second.parent_id, second.continuation) == (first.id, "edited")


async def test_chat_and_completions_do_not_mix(world: World) -> None:
    await world.http.post("/v1/chat/completions", json={"model": "policy", "messages": [USER]})
    await post(world, {"prompt": USER["content"]})
    assert len(await world.sessions()) == 2


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}, {"n": 2, "prompt": ["a", "b"], "echo": True}])
async def test_an_idempotency_key_replays_all_answers_after_a_restart(world: World, body: dict[str, Any]) -> None:
    first = await post(world, body, x_base_rl_session="job", idempotency_key="k")
    world.restart()
    again = await post(world, body, x_base_rl_session="job", idempotency_key="k")
    assert again.json() == first.json()


async def test_a_prompt_beyond_the_context_names_the_prompt(world: World) -> None:
    response = await post(world, {"prompt": "日" * 600})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [10**6], ["a", ""]])
async def test_invalid_prompts_are_refused(world: World, prompt: Any) -> None:
    response = await post(world, {"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert world.engine.requests == []


async def test_every_path_serves(world: World) -> None:
    session, key = await world.session_key()
    headers = {"authorization": f"Bearer {key}"}
    for path in ("/completions", PATH, f"/sessions/{session}/v1/completions", f"/sessions/{session}/completions"):
        response = await world.http.post(path, json={"model": "policy", "prompt": "x"}, headers=headers)
        assert response.status_code == 200


async def test_the_official_sdk_reads_answers_and_streams(world: World) -> None:
    async with world.sdk() as client:
        whole = await client.completions.create(model="policy", prompt=[ASKED, "B"], n=2, logprobs=1, max_tokens=20)
        assert [choice.text for choice in whole.choices] == ["The answer is 42."] * 4
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens is not None
        assert "".join(whole.choices[0].logprobs.tokens) == "The answer is 42."
        stream = await client.completions.create(
            model="policy", prompt=ASKED, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "The answer is 42."
    assert chunks[-1].usage is not None


def parse(**body: Any) -> Any:
    raw = json.dumps({"model": "m", "prompt": "x", **body}).encode()
    return parse_completion(raw, lambda ids: "".join(map(str, ids)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, 0.5]]}, "prompt[1][1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [[["x"]]]}, "prompt[0][0]"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 10, "n": 128}, "n"),
        ({"n": 0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"stop": [""]}, "stop[0]"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_a_wrong_value_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"echo": True, "logprobs": 0}, "logprobs")],
)
def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**body)
    assert caught.value.param == param


def test_explicit_null_is_absent_for_every_optional_field() -> None:
    names = ["n", "best_of", "max_tokens", "logprobs", "echo", "suffix", "stream", "stream_options", "temperature",
             "top_p", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty", "user",
             "x_other"]  # fmt: skip
    call = parse(**dict.fromkeys(names))
    assert (call.n, call.logprobs, call.echoes, call.sampling.max_new_tokens) == (1, False, (), 16)


def test_best_of_equal_to_n_is_accepted() -> None:
    assert parse(n=2, best_of=2, suffix="").n == 2
