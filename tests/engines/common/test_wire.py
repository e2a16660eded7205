"""Requests that our own engines refuse before they generate anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.contract.turn import Constraint, ConstraintKind
from proxy.engines.common.wire import BodyReader, GenerateBody, RequestRefused, Sampling

READER = BodyReader(GenerateBody, vocabulary=10, context=200)


def read(**body: Any) -> tuple[GenerateBody, int]:
    return READER.read(msgspec.json.encode({"input_ids": [1], **body}))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 200}, "context length"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"10": 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"n": 2}, "n`"),
        ({"regex": "a+", "ebnf": 'root ::= "a"'}, "Only one of"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"mystery": 1}, "mystery"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        read(sampling_params=parameters)


def test_numbers_that_are_not_finite_are_refused() -> None:
    for name in (b"temperature", b"top_p"):
        with pytest.raises(RequestRefused):
            READER.read(b'{"input_ids": [1], "sampling_params": {"%s": 1e999}}' % name)


@pytest.mark.parametrize("ids", [[], [10], [-1], [1] * 200])
def test_wrong_prompts_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestRefused):
        read(input_ids=ids, sampling_params={"max_new_tokens": 1})


def test_without_a_bound_an_answer_fills_the_context() -> None:
    _, limit = read(input_ids=[1] * 20, sampling_params={"max_new_tokens": None})
    assert limit == 200 - 20 - 1


def test_a_request_without_parameters_has_the_defaults() -> None:
    body, limit = read(extra_key="x")
    assert (body.sampling, limit) == (Sampling(), 128)


def test_a_constraint_is_read_back_unchanged() -> None:
    body, _ = read(sampling_params={"regex": "a+", "max_new_tokens": 3})
    assert body.sampling.constraint == Constraint(kind=ConstraintKind.REGEX, text="a+")
