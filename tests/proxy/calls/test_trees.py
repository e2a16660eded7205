"""A random tree of conversations, sent through the service call by call, is recorded as that tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.auth.service import PrincipalKind
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.agents import Messages, system, user, whole_paths
from tests.proxy.calls.world import World, open_world
from tests.running_app import bearer

_PREAMBLES = [system("You are a coding agent."), system("You are a coding agent. Be brief."), user("Hello.")]
_QUESTIONS = ["Go on.", "Why?", "Go on, please."]
_ANSWERS = ["Yes.", "The answer is 42.", "I read the file, and the test fails."]


class Step(msgspec.Struct, frozen=True):
    """A call that continues the answer of an earlier one, modulo their number, or begins a new conversation (-1)."""

    on: int
    question: int
    answer: int


Drive = Callable[[World, list[Step]], Coroutine[Any, Any, None]]

STEPS = st.lists(
    st.builds(
        Step,
        on=st.integers(-1, 30),
        question=st.integers(0, len(_QUESTIONS) - 1),
        answer=st.integers(0, len(_ANSWERS) - 1),
    ),
    min_size=1,
    max_size=8,
)


@dataclass
class Node:
    """A call that was made, and the conversation up to its answer."""

    turn_id: str
    session_id: str
    parent: Node | None
    conversation: Messages = field(default_factory=list)


@contextmanager
def one_world(directory: Path, template: ChatTemplate) -> Iterator[Callable[[Drive, list[Step]], None]]:
    """A store for all examples; each example has a key of its own."""
    with asyncio.Runner() as runner:
        opening = open_world(directory, template)
        world = runner.run(opening.__aenter__())

        def run(drive: Drive, steps: list[Step]) -> None:
            runner.run(drive(world, steps))

        try:
            yield run
        finally:
            runner.run(opening.__aexit__(None, None, None))


def check(directory: Path, template: ChatTemplate, drive: Drive, *, examples: int = 25) -> None:
    with one_world(directory, template) as run:

        @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(STEPS)
        def whatever_the_agents_do(steps: list[Step]) -> None:
            run(drive, steps)

        whatever_the_agents_do()


async def make_calls(world: World, steps: list[Step], *, name: str | None, unique: bool) -> list[Node]:
    """Make the calls. With `unique`, no two answers are equal."""
    key = await world.store.credentials.create(PrincipalKind.RUN, run_id=world.store.run.id)
    headers = bearer(key.text)
    if name is not None:
        headers["x_base_rl_session"] = f"{name} of {key.id}"
    nodes: list[Node] = []
    for number, step in enumerate(steps):
        before = nodes[step.on % len(nodes)] if nodes and step.on >= 0 else None
        begun = before.conversation if before is not None else [_PREAMBLES[step.answer]]
        asked = [*begun, user(_QUESTIONS[step.question])]
        world.say(_ANSWERS[step.answer] + (f" ({number})" if unique else ""))
        response = await world.post({"messages": asked}, **headers)
        body = response.json()
        nodes.append(
            Node(
                turn_id=body["id"],
                session_id=response.headers["x-base-rl-session"],
                parent=before,
                conversation=[*asked, body["choices"][0]["message"]],
            )
        )
    return nodes


def text_of(conversation: Messages) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_without_names_the_tree_is_recorded(tmp_path: Path, template: ChatTemplate) -> None:
    async def drive(world: World, steps: list[Step]) -> None:
        nodes = await make_calls(world, steps, name=None, unique=True)
        paths = await whole_paths(world)
        turns = {turn.id: turn for turn in await world.turns()}
        for node in nodes:
            turn = turns[node.turn_id]
            if node.parent is None:
                assert (turn.parent_id, turn.continuation, turn.attributed_by) == (None, "new", "new")
                assert all(
                    other is node or other.session_id != node.session_id for other in nodes if not other.parent
                )
                continue
            assert node.session_id == node.parent.session_id
            assert (turn.parent_id, turn.continuation) == (node.parent.turn_id, "exact")
            assert turn.attributed_by == "conversation"
            assert turn.prefix_tokens == len(paths[turn.parent_id])

    check(tmp_path, template, drive)


def test_with_a_name_the_tree_is_recorded_in_one_session(tmp_path: Path, template: ChatTemplate) -> None:
    async def drive(world: World, steps: list[Step]) -> None:
        nodes = await make_calls(world, steps, name="job", unique=True)
        paths = await whole_paths(world)
        turns = {turn.id: turn for turn in await world.turns()}
        assert len({node.session_id for node in nodes}) == 1
        for number, node in enumerate(nodes):
            turn = turns[node.turn_id]
            assert turn.attributed_by == "header"
            if node.parent is not None:
                assert (turn.parent_id, turn.continuation) == (node.parent.turn_id, "exact")
                assert turn.prefix_tokens == len(paths[turn.parent_id])
                continue
            prompt = paths[turn.id][: turn.prompt_token_count]
            shared = max((common(prompt, paths[other.turn_id]) for other in nodes[:number]), default=0)
            assert turn.prefix_tokens == shared
            assert turn.continuation == ("edited" if shared else "new")
            if turn.parent_id is not None:
                owner = turns[turn.parent_id]
                assert owner.parent_id is None or owner.prefix_tokens < shared, "the tokens are its own"

    check(tmp_path, template, drive)


def test_equal_answers_never_merge_what_differs(tmp_path: Path, template: ChatTemplate) -> None:
    """Conversations that have been equal so far cannot be distinguished; different ones are never joined."""

    async def drive(world: World, steps: list[Step]) -> None:
        nodes = await make_calls(world, steps, name=None, unique=False)
        await whole_paths(world)
        turns = {turn.id: turn for turn in await world.turns()}
        told = {node.turn_id: text_of(node.conversation) for node in nodes}
        for node in nodes:
            turn = turns[node.turn_id]
            assert turn.session_id == node.session_id
            assert turn.continuation == ("new" if node.parent is None else "exact")
            if turn.parent_id is not None:
                assert turns[turn.parent_id].session_id == node.session_id
                assert told[turn.parent_id] == told[node.turn_id][:-2]

    check(tmp_path, template, drive)
