"""Constrained answers of a model with random weights, which would not match a constraint by itself."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from proxy.contract.turn import Constraint, ConstraintKind
from proxy.engines.protocol import EngineFinish, GenerateRequest, PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.errors import InvalidRequest
from proxy.grammars.structural_tag import structural_tag
from tests.engines.conftest import Models, Reference, Server
from tests.engines.generating import END_ID, PROMPT, Answer, ask, collect, gather, open_stream
from tests.engines.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
START = "<|im_start|>"
"""A special token, used in place of tool-call markers that are special tokens."""
START_ID = TOKENIZER.get_vocab()[START]
ROOM = 250

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Alan"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1999},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/home"}]},
    },
    "required": ["name", "born", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "tag": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "maxLength": 3}, "ok": {"type": "boolean"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
}
DATES = {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2, "maxItems": 3}
FORMATS = jsonschema.FormatChecker()
SPECIAL = {"enum": ["<|im_end|>", f"a{START}b"]}
"""Texts that spell special tokens of the model, used here as plain texts."""


@FORMATS.checks("date")
def is_date(text: object) -> bool:
    """Return whether a text has the form of a date: a grammar has no calendar, so it admits the year 0."""
    return re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", str(text)) is not None


def held_to(kind: str, text: str | dict[str, Any], *, stream: bool = False, **sampling: Any) -> GenerateRequest:
    """Return a request that samples and may end."""
    if isinstance(text, dict):
        text = json.dumps(text)
    constraint = Constraint(kind=ConstraintKind(kind), text=text)
    options = {
        "temperature": 1.0,
        "logit_bias": None,
        "max_new_tokens": ROOM,
        "stop_token_ids": (END_ID,),
        **sampling,
    }
    return ask(stream=stream, constraint=constraint, **options)


def text_of(answer: Answer) -> str:
    """Return the text without the end token, which is there only if the answer ended by itself."""
    assert (answer.ids[-1] == END_ID) == (answer.finish is EngineFinish.STOP)
    assert END_ID not in answer.ids[:-1]
    ids = answer.ids[:-1] if answer.finish is EngineFinish.STOP else answer.ids
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


async def said(engine: SglangEngine, request: GenerateRequest) -> str:
    answer = await collect(engine, request)
    assert answer.finish is EngineFinish.STOP
    return text_of(answer)


@pytest.mark.parametrize("schema", [PERSON, DATES, SPECIAL], ids=["person", "dates", "special"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.9}])
async def test_every_answer_obeys_its_schema(
    engine: SglangEngine, schema: dict[str, Any], sampling: dict[str, Any]
) -> None:
    requests = [held_to("json_schema", schema, stream=index % 2 == 0, **sampling) for index in range(4)]
    for answer in await asyncio.gather(*(collect(engine, request) for request in requests)):
        text = text_of(answer)
        if answer.finish is EngineFinish.STOP:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        else:  # digits or white space up to the bound
            assert answer.finish is EngineFinish.LENGTH
            assert len(answer.ids) == ROOM


async def test_a_regular_expression_is_matched(engine: SglangEngine) -> None:
    pattern = r"(ab|[0-9]{2}){1,8}/x"
    for text in await asyncio.gather(*(said(engine, held_to("regex", pattern, top_k=5)) for _ in range(4))):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "yes" | "no" " "? pair pair?\npair ::= [0-9] | [0-9] [0-9]', 'start: "yes" | "no" /[0-9]{1,3}/'],
    ids=["gbnf", "lark"],
)
async def test_a_grammar_is_followed(engine: SglangEngine, grammar: str) -> None:
    """Grammars without recursion, because a random model might otherwise write digits forever."""
    for text in await asyncio.gather(*(said(engine, held_to("ebnf", grammar, top_k=3)) for _ in range(4))):
        assert re.fullmatch("yes|no ?[0-9]{1,4}", text)


def call_of(name: str, schema: dict[str, Any], marker: str) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{marker}\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1},
        "end": f"}}\n{marker}",
    }


@pytest.mark.parametrize("marker", [START, "<tool_call>"], ids=["token", "text"])
async def test_a_call_has_the_form_of_a_call(engine: SglangEngine, marker: str) -> None:
    calls = {
        "type": "tags_with_separator",
        "tags": [call_of("born", PERSON, marker), call_of("when", DATES, marker)],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": True,
    }
    tag = structural_tag(calls, {START: START_ID})
    for answer in await asyncio.gather(*(collect(engine, held_to("structural_tag", tag)) for _ in range(4))):
        assert answer.finish is EngineFinish.STOP
        assert (answer.ids[0] == START_ID) == (marker == START)
        body = text_of(answer).removeprefix(marker).removesuffix(marker)
        call = json.loads(body)
        jsonschema.validate(call["arguments"], {"born": PERSON, "when": DATES}[call["name"]])


async def test_text_may_come_before_a_call_and_the_call_is_one(engine: SglangEngine) -> None:
    small = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    text_or_call = {"type": "triggered_tags", "triggers": [START], "tags": [call_of("f", small, START)]}
    tag = structural_tag(text_or_call, {START: START_ID})
    bias = {str(START_ID): 7.0, str(END_ID): 4.0}
    requests = [held_to("structural_tag", tag, logit_bias=bias) for _ in range(32)]  # so many that some call
    texts = [text_of(answer) for answer in await asyncio.gather(*(collect(engine, each) for each in requests))]
    # Between its markers; the last one may be cut.
    calls = [piece for text in texts for piece in text.split(START)[1:-1:2]]
    assert calls
    for call in calls:
        assert json.loads(call)["name"] == "f"
        jsonschema.validate(json.loads(call)["arguments"], small)
    assert any(not text.startswith(START) for text in texts)


async def test_unconstrained_requests_in_the_batch_are_not_touched(
    engine: SglangEngine, reference: Reference, server: Server
) -> None:
    free = ask(max_new_tokens=40)
    answers = await asyncio.gather(
        collect(engine, free),
        *(said(engine, held_to("regex", "a{3}|b{50}")) for _ in range(5)),
        collect(engine, ask(temperature=0.0, max_new_tokens=20)),
    )
    for answer in (answers[0], answers[-1]):
        assert isinstance(answer, Answer)
        assert answer.ids == reference.greedy(PROMPT, len(answer.ids))
        assert answer.logprobs == pytest.approx(reference.of_output(PROMPT, answer.ids), abs=server.exactness)


async def test_logprobs_are_of_the_distribution_that_the_mask_leaves(
    engine: SglangEngine, reference: Reference, server: Server
) -> None:
    """They are renormalised over the allowed tokens, at the temperature that was sampled at."""
    letters = TOKENIZER.encode("abcd")
    request = held_to("regex", "[abcd]{20}", temperature=0.7)
    answer = await collect(engine, msgspec.structs.replace(request, top_logprobs=3))
    assert len(answer.ids) == 21
    rows = reference.logprobs([*PROMPT, *answer.ids], temperature=0.7)[len(PROMPT) - 1 :]
    for row, token, logprob in zip(rows, answer.ids[:20], answer.logprobs, strict=False):
        expected = row[token] - row[letters].logsumexp(0)
        assert logprob == pytest.approx(float(expected), abs=server.exactness)
    assert answer.logprobs[20] == pytest.approx(0.0, abs=1e-6), "nothing but the end can come"
    assert dict(answer.tops[20]).keys() == {END_ID}
    assert all({token for token, _ in top} <= set(letters) for top in answer.tops[:20])


@pytest.mark.parametrize("stream", [False, True])
async def test_top_logprobs_are_the_most_probable_tokens(
    engine: SglangEngine, reference: Reference, server: Server, *, stream: bool
) -> None:
    request = ask(temperature=0.8, max_new_tokens=12, stream=stream)
    answer, other, without = await asyncio.gather(
        collect(engine, msgspec.structs.replace(request, top_logprobs=5)),
        collect(engine, msgspec.structs.replace(ask(max_new_tokens=6), top_logprobs=20)),
        collect(engine, ask(max_new_tokens=6)),
    )
    assert without.tops == ()
    for each, count, temperature in ((answer, 5, 0.8), (other, 20, 1.0)):
        rows = reference.logprobs([*PROMPT, *each.ids], temperature)[len(PROMPT) - 1 :]
        assert len(each.tops) == len(each.ids)
        for row, top, token, logprob in zip(rows, each.tops, each.ids, each.logprobs, strict=False):
            assert [value for _, value in top] == pytest.approx(row.topk(count).values.tolist(), abs=server.exactness)
            assert all(value == pytest.approx(float(row[rank]), abs=server.exactness) for rank, value in top)
            assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", "{", "JSON"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-ahead"),
        ("json_schema", '{"$ref": "#/$defs/missing"}', "missing"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "minimum"),
        ("regex", "(a", "unclosed"),
        ("ebnf", 'start: "a" other', "other"),
        ("structural_tag", '{"format": {"type": "sorcery"}}', "sorcery"),
        ("structural_tag", '{"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]}', "begin"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_constraint_that_cannot_be_enforced_is_refused_with_the_reason(
    engine: SglangEngine, kind: str, text: str, words: str, *, stream: bool
) -> None:
    for _ in range(2):  # the second time from the engine's cache
        with pytest.raises(InvalidRequest, match=words):
            await collect(engine, held_to(kind, text, stream=stream))
    assert await said(engine, held_to("regex", "ok")) == "ok"


async def test_an_answer_that_is_cut_is_a_beginning(engine: SglangEngine) -> None:
    answer = await collect(engine, held_to("regex", "[ab]{40}", max_new_tokens=10))
    assert answer.finish is EngineFinish.LENGTH
    assert re.fullmatch("[ab]{10}", text_of(answer))


async def test_a_stop_string_ends_a_constrained_answer(engine: SglangEngine) -> None:
    answer = await collect(engine, held_to("regex", "[ab]{40}", stop=("a",)))
    assert answer.finish is EngineFinish.STOP
    assert re.fullmatch("b*a", str(TOKENIZER.decode(list(answer.ids))))


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_constraint_holds_through_a_swap(engine: SglangEngine, models: Models, mode: PauseMode) -> None:
    pattern = "(abc){40}[0-9]{30}"
    stream = open_stream(engine, held_to("regex", pattern, stream=True))
    chunks = [await anext(stream)]
    await engine.pause(mode)
    await engine.load_weights(str(models.b), "b")
    await engine.resume()
    answer = gather(chunks + [chunk async for chunk in stream])
    assert [span.label for span in answer.spans] == ["a", "b"]
    assert re.fullmatch(pattern, text_of(answer))


async def test_an_ignored_end_token_ends_a_complete_constrained_answer(
    engine: SglangEngine, http: httpx.AsyncClient, server: Server
) -> None:
    if server.kind == "sglang":
        pytest.skip("SGLang goes on with end tokens")
    parameters = {"max_new_tokens": 30, "temperature": 1, "ignore_eos": True, "regex": "ab"}
    reply = (await http.post("/generate", json={"input_ids": list(PROMPT), "sampling_params": parameters})).json()
    assert TOKENIZER.decode(reply["output_ids"][:2]) == "ab"
    assert len(reply["output_ids"]) <= 3
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"


async def test_seeds_hold_under_a_constraint(engine: SglangEngine, server: Server) -> None:
    if server.kind == "sglang":
        pytest.skip("SGLang honours seeds only with --enable-deterministic-inference, which its CPU backend lacks")
    first, again, other = [await said(engine, held_to("regex", "[a-z]{30}", seed=seed)) for seed in (3, 3, 4)]
    assert first == again != other


async def test_references_as_deep_as_none_are_do_not_end_the_engine(server: Server, http: httpx.AsyncClient) -> None:
    """The test sends the schema to the engine directly, because the proxy refuses it."""
    if server.kind == "sglang":
        pytest.skip("SGLang has no bound of its own: its stack decides")
    links = {
        f"a{index}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/a{index + 1}"}},
            "required": ["x"],
            "additionalProperties": False,
        }
        for index in range(3000)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**links, "a3000": {"type": "null"}}}
    for text in (json.dumps(schema), json.dumps(schema) + " " * (1 << 20)):
        body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 3, "json_schema": text}}
        assert (await http.post("/generate", json=body)).status_code in {httpx.codes.OK, httpx.codes.BAD_REQUEST}
    assert (await http.get("/health_generate")).status_code == httpx.codes.OK
