from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.choices import Asked, Prompt, prompts_alike, superseded_turns
from proxy.contract.turn import Continuation

Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[Prompt, Path]]:
    """Prompts of few different ids, each with all of its tokens; some keep a part of an earlier path."""
    made: list[tuple[Prompt, Path]] = []
    paths: list[Path] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        shared = 0 if parent is None else draw(st.integers(0, len(paths[parent])))
        own = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
        if parent is not None and shared <= len(paths[parent]) and own:
            own = (7, *own)  # the store shares equal tokens: a branch begins with another token
        whole = (*(() if parent is None else paths[parent][:shared]), *own)
        made.append((Prompt(parent, shared, len(whole), own), whole))
        paths.append((*whole, 100 + number))
    return made


@given(trees())
def test_prompts_alike_have_the_same_tokens(tree: list[tuple[Prompt, Path]]) -> None:
    """Turns at the same place in the tree are found, and no others."""
    found = prompts_alike([prompt for prompt, _ in tree])
    for place, first in enumerate(found):
        assert first <= place
        assert found[first] == first
        assert tree[first][1] == tree[place][1]
    for place, (prompt, _) in enumerate(tree):
        twins = [earlier for earlier in range(place) if tree[earlier][0] == prompt]
        assert not twins or found[place] == found[twins[0]]


def asked(
    name: str,
    *,
    parent: int | None = None,
    shared: int = 0,
    own: Sequence[int] = (1, 2, 3),
    continuation: Continuation = Continuation.EXACT,
    at: float = 0.0,
    takes: float = 1.0,
) -> Asked:
    prompt = Prompt(parent, shared, shared + len(own), tuple(own))
    return Asked(name, prompt, Continuation.NEW if parent is None else continuation, at, at + takes)


CHOICES = [asked("a", takes=1.0), asked("b", takes=3.0), asked("c", takes=2.0)]
"""Choices of one call with answers of two tokens: paths are five tokens long."""


def test_choices_that_the_agent_did_not_continue_are_superseded() -> None:
    later = asked("d", parent=1, shared=5, own=(9,), at=4.0)
    assert superseded_turns([*CHOICES, later]) == {"a", "c"}


def test_at_the_end_of_a_session_no_choice_is_superseded() -> None:
    assert superseded_turns(CHOICES) == frozenset()
    again = [asked(name, parent=1, shared=5, own=(9,), at=4.0) for name in "de"]
    assert superseded_turns([*CHOICES, *again]) == {"a", "c"}, "of the last call both remain"


def test_all_continued_choices_remain() -> None:
    tree_search = [asked("d", parent=0, shared=5, own=(9,), at=4.0), asked("e", parent=2, shared=4, own=(9,), at=4.0)]
    assert superseded_turns([*CHOICES, *tree_search]) == {"b"}


def test_a_call_that_shares_only_the_prompt_continues_no_choice() -> None:
    title = asked("d", parent=1, shared=3, own=(9,), continuation=Continuation.EDITED, at=4.0)
    assert superseded_turns([*CHOICES, title]) == frozenset()


def test_an_answer_whose_thoughts_the_template_strips_counts_as_continued() -> None:
    """The next prompt contains none of its tokens, but the conversation was recognised."""
    stripped = asked("d", parent=1, shared=3, own=(8, 9), continuation=Continuation.RETEMPLATED, at=4.0)
    assert superseded_turns([*CHOICES, stripped]) == {"a", "c"}


def test_a_retry_supersedes_the_answer_before_it() -> None:
    """The store may share their tokens in either form: as one more root, or as the whole prompt of the first."""
    first = asked("a")
    for retry in (
        asked("b", at=2.0),
        asked("b", parent=0, shared=3, own=(), continuation=Continuation.EDITED, at=2.0),
    ):
        later = asked("c", parent=1, shared=5, own=(9,), at=4.0)
        assert superseded_turns([first, retry, later]) == {"a"}
        went_back = asked("c", parent=0, shared=5, own=(9,), at=4.0)
        assert superseded_turns([first, retry, went_back]) == frozenset(), "the later answer came last"


def test_calls_at_the_same_time_do_not_supersede_each_other() -> None:
    """Sub-agents that ask the same question: one answers at once, the other continues."""
    beside = asked("b", at=0.5)
    later = asked("c", parent=1, shared=5, own=(9,), at=4.0)
    assert superseded_turns([asked("a"), beside, later]) == frozenset()
