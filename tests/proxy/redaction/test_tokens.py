from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.redaction.rules import load_rules
from proxy.redaction.text import TextRedactor
from proxy.redaction.tokens import masked_tokens
from proxy.settings import RedactionSettings
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import write_model

RULES = RedactionSettings(rules=("email", "phone", "credit_card", "ip"), patterns={"umlaut": "ärger"})
PIECES = [
    "a@b.org",
    "mail ",
    "@",
    ".org",
    "7946 0958",
    "+44 20 ",
    "4111 1111 1111 ",
    "1111",
    "10.0.",
    "0.1",
    "ärger",
    "é",
    "\n",
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("model"))))


@given(
    before=st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    own=st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
)
@settings(max_examples=150)
def test_the_rules_find_nothing_in_the_text_of_stored_ids(template: ChatTemplate, before: str, own: str) -> None:
    redactor = TextRedactor(load_rules(RULES))
    decoder = TokenDecoder(template.tokenizer, hidden=template.special_ids)
    parent = (*template.encode(before), template.stop_ids[0])
    placeholder = template.encode("\n")[-1]
    earlier, _ = masked_tokens((), parent, redactor, decoder, placeholder)
    given_ids = (*template.encode(own), template.stop_ids[0])
    ids, masked = masked_tokens(parent, given_ids, redactor, decoder, placeholder)
    assert len(ids) == len(given_ids)
    assert redactor.found(template.tokenizer.decode([*earlier, *ids], skip_special_tokens=False)) == []
    hidden = {position for start, end in masked for position in range(start, end)}
    for position, (new, old) in enumerate(zip(ids, given_ids, strict=True)):
        assert new == (placeholder if position in hidden else old)
    assert all(end < start for (_, end), (start, _) in pairwise(masked))
    if not redactor.found(before) and not redactor.found(own):
        assert masked == ()


def test_special_tokens_are_not_redacted(template: ChatTemplate) -> None:
    redactor = TextRedactor(load_rules(RedactionSettings(patterns={"all": r"[\s\S]+"})))
    decoder = TokenDecoder(template.tokenizer, hidden=template.special_ids)
    end = template.stop_ids[0]
    placeholder = template.encode("\n")[-1]
    ids, _ = masked_tokens((), (*template.encode("one two"), end), redactor, decoder, placeholder)
    assert ids[-1] == end
    assert set(ids[:-1]) == {placeholder}
