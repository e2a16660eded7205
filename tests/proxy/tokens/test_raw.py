"""Raw prompts: recognised as continuing a completion, and continued from its ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation
from proxy.errors import InvalidRequest
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.prefix import KnownTurn, PromptPlan
from proxy.tokens.raw import (
    NO_TOOLS,
    CompletionIndex,
    RawPrompt,
    SaidAnswer,
    length_of,
    plan_ids,
    plan_text,
    plan_text_behind,
)
from proxy.tokens.stop_strings import StopTrimmer
from proxy.tokens.template import ChatTemplate

TEXT = st.text(st.sampled_from("ab =\n-é日"), max_size=12)


def decoder_of(template: ChatTemplate) -> TokenDecoder:
    return TokenDecoder(template.tokenizer, hidden=template.special_ids)


def turn(path_ids: Sequence[int]) -> KnownTurn:
    return KnownTurn(id=TurnId("turn_1"), path_ids=TokenIds.of(path_ids), tools_hash=NO_TOOLS)


def whole_text(template: ChatTemplate, ids: Sequence[int]) -> str:
    return template.tokenizer.decode(list(ids), skip_special_tokens=False)


def behind(template: ChatTemplate, asked: str, output: tuple[int, ...], said: str, rest: str) -> PromptPlan:
    path = template.encode(asked) + output
    answer = SaidAnswer(text=said, tokens=len(output))
    plan = plan_text_behind(template, decoder_of(template), turn(path), answer, rest)
    assert plan.input_ids[: plan.prefix_tokens] == path[: plan.prefix_tokens]
    return plan


def by_characters(template: ChatTemplate, text: str) -> tuple[int, ...]:
    """Return ids as no tokenizer would split the text, but a model may."""
    return tuple(token for character in text for token in template.encode(character))


@given(asked=TEXT.filter(bool), said=TEXT, rest=TEXT)
def test_ids_of_an_answer_are_kept_however_it_was_split(
    template: ChatTemplate, asked: str, said: str, rest: str
) -> None:
    output = by_characters(template, said)
    plan = behind(template, asked, output, said, rest)
    assert plan.continuation is Continuation.EXACT
    assert plan.input_ids == template.encode(asked) + output + template.encode(rest)


@given(asked=TEXT.filter(bool), said=TEXT, rest=TEXT)
def test_an_end_mark_stays_only_where_the_client_writes_it(
    template: ChatTemplate, asked: str, said: str, rest: str
) -> None:
    spoken, stop = by_characters(template, said), template.stop_ids[0]
    without = behind(template, asked, (*spoken, stop), said, rest)
    assert without.input_ids == template.encode(asked) + spoken + template.encode(rest)
    assert without.continuation is Continuation.EXACT
    mark = template.token_text(stop)
    with_mark = behind(template, asked, (*spoken, stop), said, mark + rest)
    assert with_mark.prefix_tokens == len(template.encode(asked)) + len(spoken) + 1
    assert whole_text(template, with_mark.input_ids) == asked + said + mark + rest


@given(asked=TEXT.filter(bool), said=TEXT, stop=st.sampled_from(["=-", "\n\n", "ab", "日é"]), rest=TEXT)
def test_a_stop_string_stays_where_the_client_writes_it_and_is_cut_off_otherwise(
    template: ChatTemplate, asked: str, said: str, stop: str, rest: str
) -> None:
    said = StopTrimmer([stop]).feed(said + stop)
    output = template.encode(said + stop)  # a token may contain both the end of the shown text and the stop string
    going_on = behind(template, asked, output, said, stop + rest)
    assert going_on.continuation is Continuation.EXACT
    assert going_on.input_ids == template.encode(asked) + output + template.encode(rest)
    elsewhere = behind(template, asked, output, said, "X" + rest)
    assert elsewhere.continuation is Continuation.EDITED
    assert whole_text(template, elsewhere.input_ids) == asked + said + "X" + rest


def test_an_answer_cut_within_a_character_can_be_continued(template: ChatTemplate) -> None:
    output = template.encode("日")[:1]
    plan = behind(template, "Say: ", output, decoder_of(template).text(output), " no")
    assert plan.input_ids == template.encode("Say: ") + output + template.encode(" no")


def test_special_tokens_in_the_prompt_cause_no_error(template: ChatTemplate) -> None:
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    output = (*template.encode("42"), template.stop_ids[0])
    rest = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    plan = behind(template, asked, output, "42", rest)
    assert plan.prefix_tokens == len(template.encode(asked) + output)
    assert whole_text(template, plan.input_ids) == asked + "42" + rest


def test_an_empty_answer_can_be_continued(template: ChatTemplate) -> None:
    plan = behind(template, "Say: ", (template.stop_ids[0],), "", "no")
    assert plan.input_ids == template.encode("Say: ") + template.encode("no")


def test_a_text_that_extends_nothing_is_a_branch_or_new(template: ChatTemplate) -> None:
    first = plan_text(template, "The answer is 42.", [])
    assert first.continuation is Continuation.NEW
    plan = plan_text(template, "The answer is 25.", [turn(first.input_ids)])
    assert plan.continuation is Continuation.EDITED
    assert 0 < plan.prefix_tokens < len(first.input_ids)
    with pytest.raises(InvalidRequest, match="empty"):
        plan_text(template, "", [])


def test_ids_are_taken_as_they_are(template: ChatTemplate) -> None:
    path = (5, 6, 7, template.stop_ids[0])
    same = plan_ids(template, TokenIds.of((5, 6, 7, 8)), [turn(path)])
    assert (tuple(same.input_ids), same.prefix_tokens, same.continuation) == ((5, 6, 7, 8), 3, Continuation.EXACT)
    whole = plan_ids(template, TokenIds.of((*path, 9)), [turn(path)])
    assert (whole.prefix_tokens, whole.continuation) == (4, Continuation.EXACT)
    other = plan_ids(template, TokenIds.of((5, 6, 9)), [turn(path)])
    assert (other.prefix_tokens, other.continuation) == (2, Continuation.EDITED)
    assert plan_ids(template, TokenIds.of((9,)), [turn(path)]).continuation is Continuation.NEW


@pytest.mark.parametrize("ids", [(), (10**9,)])
def test_no_ids_and_unknown_ones_are_refused(template: ChatTemplate, ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_ids(template, TokenIds.of(ids), [])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("ids", [(-1,), (2**32,)])
def test_ids_that_no_vocabulary_has_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        RawPrompt(ids)


@given(st.lists(TEXT, min_size=1, max_size=8), TEXT)
def test_every_completion_that_a_prompt_extends_is_found_longest_first(texts: list[str], rest: str) -> None:
    index = CompletionIndex()
    for text in texts:
        index.keep(RawPrompt(text))
    prompt = texts[0] + rest
    found = index.extended_by(RawPrompt(prompt))
    expected = {RawPrompt(text).digest for text in texts if prompt.startswith(text) and text != prompt}
    assert set(found) == expected
    assert [length_of(digest) for digest in found] == sorted((length_of(d) for d in expected), reverse=True)
    assert all(RawPrompt(prompt).extends(digest) for digest in found)


def test_a_long_common_beginning_tells_nothing_yet() -> None:
    index = CompletionIndex()
    index.keep(RawPrompt("x" * 100 + "one"))
    index.keep(RawPrompt("x" * 100 + "two"))
    assert index.extended_by(RawPrompt("x" * 100 + "two!")) == (RawPrompt("x" * 100 + "two").digest,)


def test_text_and_ids_are_never_taken_for_each_other() -> None:
    index = CompletionIndex()
    index.keep(RawPrompt((0x41414141,)))
    assert index.extended_by(RawPrompt("AAAA")) == ()
    assert index.extended_by(RawPrompt((0x41414141, 1))) == (RawPrompt((0x41414141,)).digest,)


def test_a_completion_of_which_only_the_digest_is_left_is_found() -> None:
    index = CompletionIndex()
    index.recall(RawPrompt("The answer is 42.").digest)
    assert index.extended_by(RawPrompt("The answer is 42. And")) == (RawPrompt("The answer is 42.").digest,)
    assert index.extended_by(RawPrompt("The answer is 43. And")) == ()


def test_the_index_is_bounded() -> None:
    index = CompletionIndex(kept=2)
    for text in ("a", "b", "a", "c"):
        index.keep(RawPrompt(text))
    assert [bool(index.extended_by(RawPrompt(text + "!"))) for text in ("a", "b", "c")] == [True, False, True]
    for number in range(10):
        index.keep(RawPrompt(f"{number}" * 20))
    assert len(index._lengths) == 2


def test_a_completion_of_ids_ends_before_its_end_mark() -> None:
    assert RawPrompt((1, 2)).answered("x", (3, 9), (9,)).given == (1, 2, 3)
    assert RawPrompt((1, 2)).answered("x", (3, 4), (9,)).given == (1, 2, 3, 4)
    assert RawPrompt("a").answered("bc", (3, 9), (9,)).given == "abc"


def test_the_beginning_that_a_tokenizer_gives_every_text(template: ChatTemplate) -> None:
    assert template.encode_prompt("The answer") == template.encode("The answer")
