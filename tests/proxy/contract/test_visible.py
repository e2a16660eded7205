from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.visible import visible, visible_values


def harmless(text: str) -> bool:
    """Return whether the text has no control character but line feed and tab, no mark of direction, and can be
    encoded."""
    text.encode()
    return not any(
        (unicodedata.category(c) == "Cc" and c not in "\n\t") or unicodedata.bidirectional(c) in _DIRECTIONS
        for c in text
    )


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
ANY = st.text(st.characters(exclude_categories=()))


@given(ANY)
def test_no_control_sequence_remains(text: str) -> None:
    assert harmless(visible(text))
    assert "\n" not in visible(text, one_line=True)
    assert visible(visible(text)) == visible(text)


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs", "M"))))
def test_ordinary_text_of_any_language_stays(text: str) -> None:
    assert visible(text + "\n\t") == text + "\n\t"


@given(st.dictionaries(ANY, ANY | st.lists(ANY)))
def test_json_stays_json_with_the_same_content(value: dict[str, object]) -> None:
    for ascii_only in (True, False):
        assert json.loads(visible(json.dumps(value, ensure_ascii=ascii_only))) == json.loads(json.dumps(value))


def test_only_tracebacks_have_lines_in_a_log() -> None:
    event = {"event": "a\nb\x1b]0;t\x07", "exception": "a\nb\x1b", "status": 200}
    assert visible_values(None, "info", event) == {
        "event": "a\\u000ab\\u001b]0;t\\u0007",
        "exception": "a\nb\\u001b",
        "status": 200,
    }
