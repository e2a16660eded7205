"""Changes that agents make to their conversations, and the resulting token trees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy.calls.agents import Agent, system, user, whole_paths
from tests.proxy.calls.world import CALL, TOOLS, World, until

CODER = system("You are a coding agent. Use the tools and answer in one line.")
FIX = user("The test of add() fails. Please fix it.")
TITLER = system("You write titles. Answer with a title of at most six words and nothing else.")
NAMED = {"x-session-id": "ses_7f3aKqTzB2VnYc1dHs"}
TOLD = [NAMED, {}]
"""Headers with a session's name, and without."""


@pytest.fixture
def chat_url(database_url: str) -> str:
    """These calls depend much on the store, so they run on both databases."""
    return database_url


async def tree(world: World) -> list[tuple[str, int | None, str]]:
    """Return every turn's session, the number of its parent and its continuation, in order of arrival."""
    turns = await world.turns()
    numbers = {turn.id: number for number, turn in enumerate(turns)}
    return [
        (turn.session_id, None if turn.parent_id is None else numbers[turn.parent_id], turn.continuation)
        for turn in turns
    ]


async def shape(world: World) -> list[tuple[int | None, str]]:
    """Return the tree of a store with one session."""
    found = await tree(world)
    assert len({session for session, _, _ in found}) == 1
    await whole_paths(world)
    return [(parent, continuation) for _, parent, continuation in found]


async def test_a_title_call_beside_the_first_one_is_a_branch_of_its_session(world: World) -> None:
    """OpenCode requests a title during the agent's first call, with the same session header."""
    agent = Agent(world, CODER, FIX, headers=NAMED, tools=TOOLS)
    world.say(CALL, "Fixing a failing add test")
    world.engine.gate.clear()
    first = asyncio.create_task(agent.ask())
    await world.engine.held.wait()
    title = asyncio.create_task(agent.aside([TITLER, FIX], tools=None))
    await until(lambda: len(world.engine.requests) == 2)
    world.engine.gate.set()
    await asyncio.gather(first, title)
    await agent.result("42", answer="It is fixed.")
    turns = await world.turns()
    main = next(turn for turn in turns if turn.request.get("tools"))
    assert [turn.state for turn in turns] == ["complete"] * 3
    assert (turns[-1].parent_id, turns[-1].continuation) == (main.id, "exact")
    assert len(set(agent.sessions)) == 1
    assert {turn.attributed_by for turn in turns} == {"agent_header"}
    await whole_paths(world)


async def test_a_title_call_after_the_first_one_shares_what_it_can(world: World) -> None:
    agent = Agent(world, CODER, FIX, headers=NAMED)
    await agent.ask(answer="I look at add() first.")
    await agent.ask(user("Go on."), answer="add() subtracts.")
    await agent.aside([TITLER, FIX], answer="Fixing a failing add test")
    await agent.ask(user("Go on."), answer="It is fixed.")
    assert await shape(world) == [(None, "new"), (0, "exact"), (0, "edited"), (1, "exact")]
    title = (await world.turns())[2]
    assert title.messages == [TITLER, FIX], "the whole request is kept, as it shares no message"


async def test_a_title_call_without_any_name_does_not_disturb_the_conversation(world: World) -> None:
    agent = Agent(world, CODER, FIX)
    await agent.ask(answer="I look at add() first.")
    title = agent.fork()
    await title.aside([TITLER, FIX], answer="Fixing a failing add test")
    await agent.ask(user("Go on."), answer="It is fixed.")
    main, apart = agent.sessions[0], title.sessions[0]
    assert main != apart, "it says nothing of its session: it has one of its own"
    assert await tree(world) == [(main, None, "new"), (apart, None, "new"), (main, 0, "exact")]
    assert [turn.attributed_by for turn in await world.turns()] == ["new", "new", "conversation"]


@pytest.mark.parametrize("headers", TOLD)
async def test_a_reflection_without_tools_branches_and_the_agent_continues_from_before_it(
    world: World, headers: dict[str, str]
) -> None:
    agent = Agent(world, CODER, FIX, headers=headers, tools=TOOLS)
    await agent.ask(answer=CALL)
    reflection = [*agent.messages, {"role": "tool", "tool_call_id": "call", "content": "42"}]
    reflection += [user("Reflect on your last step. Do not call tools.")]
    await agent.aside(reflection, answer="The sum was right.", tools=None)
    await agent.result("42", answer="It is fixed.")
    assert await shape(world) == [(None, "new"), (0, "edited"), (0, "exact")]
    assert len(set(agent.sessions)) == 1


@pytest.mark.parametrize("headers", TOLD)
async def test_both_forks_of_a_conversation_continue(world: World, headers: dict[str, str]) -> None:
    agent = Agent(world, CODER, FIX, headers=headers)
    await agent.ask(answer="Plan: read, then edit.")
    await agent.ask(user("Read."), answer="add() subtracts.")
    left, right = agent.fork(), agent.fork()
    await agent.ask(user("Edit."), answer="Done.")
    await left.ask(user("Edit it with sed."), answer="Done with sed.")
    await right.ask(user("Write it anew."), answer="Written anew.")
    await left.ask(user("Test."), answer="Passed.")
    await right.ask(user("Test."), answer="Passed.")
    assert await shape(world) == [
        (None, "new"),
        (0, "exact"),
        (1, "exact"),
        (1, "exact"),
        (1, "exact"),
        (3, "exact"),
        (4, "exact"),
    ]


@pytest.mark.parametrize("headers", TOLD)
async def test_a_fork_at_an_earlier_turn_continues_from_there(world: World, headers: dict[str, str]) -> None:
    agent = Agent(world, CODER, FIX, headers=headers)
    await agent.ask(answer="Plan: read, then edit.")
    back = agent.fork()
    for step in range(10):
        await agent.ask(user(f"Step {step}."), answer=f"Step {step} is done.")
    await back.ask(user("Think again."), answer="Another plan.")
    assert (await shape(world))[-1] == (0, "exact")


async def test_a_compacted_conversation_is_a_branch_that_continues(world: World) -> None:
    """The agent requests a summary of its history, and continues with the summary and the latest messages."""
    agent = Agent(world, CODER, FIX, headers=NAMED)
    await agent.ask(answer="I read the file.")
    await agent.ask(user("Go on."), answer="add() subtracts.")
    summary = await agent.aside([*agent.messages, user("Sum up what happened so far.")], answer="add() was read.")
    latest = agent.messages[-2:]
    agent.messages = [CODER, user(f"So far: {summary['content']}"), *latest]
    await agent.ask(user("Edit it."), answer="Edited.")
    await agent.ask(user("Test."), answer="Passed.")
    found = await shape(world)
    assert found[:3] == [(None, "new"), (0, "exact"), (1, "exact")]
    assert found[3] == (0, "edited"), "the system prompt is the first turn's"
    assert found[4] == (3, "exact")
    compacted = (await world.turns())[3]
    assert compacted.prefix_tokens >= len(world.template.encode(CODER["content"])), "the system prompt is shared"


async def test_a_compaction_without_a_name_opens_a_session_that_continues(world: World) -> None:
    agent = Agent(world, CODER, FIX)
    await agent.ask(answer="I read the file.")
    agent.messages = [CODER, user("So far: the file was read.")]
    await agent.ask(user("Edit it."), answer="Edited.")
    await agent.ask(user("Test."), answer="Passed.")
    before, after = agent.sessions[0], agent.sessions[1]
    assert await tree(world) == [(before, None, "new"), (after, None, "new"), (after, 1, "exact")]


async def test_a_reminder_that_floats_behind_the_messages_makes_branches(world: World) -> None:
    """It is the last message of every request, and missing from the next one."""
    reminder = system("Remember: the work is not done until the tests pass.")
    agent = Agent(world, CODER, FIX, headers=NAMED)
    for step in range(3):
        answer = await agent.aside([*agent.messages, reminder], answer=f"Step {step} is done.")
        agent.messages += [answer, user(f"Go on with step {step + 1}.")]
    found = await shape(world)
    assert found[0] == (None, "new")
    assert [continuation for _, continuation in found[1:]] == ["edited", "edited"]
    shared = [turn.prefix_tokens for turn in await world.turns()]
    assert 0 < shared[1] < shared[2], "each shares all that was before the reminder"


@pytest.mark.parametrize("role", ["system", "user"])
async def test_a_reminder_that_floats_behind_an_unnamed_conversation_does_not_tear_it(
    world: World, role: str
) -> None:
    agents = [Agent(world, CODER, user(f"Fix the test of {name}.")) for name in ("add()", "mul()")]
    world.say("Done.")
    for step in range(4):
        for agent in agents:
            reminder = {"role": role, "content": f"Remember: step {step} is not the last."}
            answer = await agent.aside([*agent.messages, reminder])
            agent.messages += [answer, user(f"Go on with step {step + 1}.")]
    for agent in agents:
        assert len(set(agent.sessions)) == 1
    assert agents[0].sessions[0] != agents[1].sessions[0]
    found = await tree(world)
    assert [continuation for _, _, continuation in found] == ["new"] * 2 + ["edited"] * 6
    assert [turn.attributed_by for turn in await world.turns()] == ["new"] * 2 + ["conversation"] * 6
    await whole_paths(world)


async def test_sub_agents_in_parallel_keep_to_their_own_branches(world: World) -> None:
    """Codex: the agent and its sub-agents have one session-id, and thread-ids of their own."""

    def threaded(thread: str, *messages: dict[str, Any]) -> Agent:
        return Agent(world, *messages, headers={"session-id": "019ee74f", "thread-id": thread})

    lead = threaded("lead", CODER, FIX)
    await lead.ask(answer="I ask two helpers.")
    helpers = [threaded(f"helper {n}", system(f"You are helper {n}."), user(f"Look at part {n}.")) for n in range(3)]
    for step in range(3):
        for helper in helpers:
            helper.messages += [user(f"Step {step}.")] if step else []
        answers = [f"Part {n}, step {step}." for n in range(3)]
        world.say(*answers)
        await asyncio.gather(*(helper.ask() for helper in helpers))
    await lead.ask(user("They are done."), answer="So am I.")
    turns = await world.turns()
    assert {turn.session_id for turn in turns} == {lead.sessions[0]}
    parents = {turn.id: turn.parent_id for turn in turns}
    exact = [turn for turn in turns if turn.continuation == "exact"]
    assert len(exact) == 3 * 2 + 1
    assert len({parents[turn.id] for turn in exact}) == len(exact), "nobody goes on from another's turn"
    assert turns[-1].parent_id == turns[0].id
    await whole_paths(world)


async def test_two_agents_with_equal_texts_continue_separately(world: World) -> None:
    """A group's attempts begin alike, and their first answers may be equal too."""
    agents = [Agent(world, CODER, FIX) for _ in range(3)]
    world.say("Plan: read, then edit.")
    await asyncio.gather(*(agent.ask() for agent in agents))
    for step in range(3):
        for number, agent in enumerate(agents):
            agent.messages.append(user(f"Attempt {number}, step {step}."))
        await asyncio.gather(*(agent.ask() for agent in agents))
    sessions = [agent.sessions[1:] for agent in agents]
    assert all(len(set(mine)) == 1 for mine in sessions), "from the second call on each has its own"
    assert len({mine[0] for mine in sessions}) == 3
    assert sorted(session for session, _, _ in await tree(world)) == sorted(4 * [mine[0] for mine in sessions])


async def test_a_conversation_continued_after_its_final_reward_is_a_new_session(world: World) -> None:
    agent = Agent(world, CODER, FIX)
    await agent.ask(answer="It is fixed.")
    ended = agent.sessions[0]
    end = await world.http.post(f"/v1/sessions/{ended}/end")
    assert end.status_code == 200
    await agent.ask(user("Now the test of mul()."), answer="Fixed as well.")
    await agent.ask(user("Thank you."), answer="You are welcome.")
    assert agent.sessions[1] == agent.sessions[2] != ended
    assert await tree(world) == [
        (ended, None, "new"),
        (agent.sessions[1], None, "new"),
        (agent.sessions[1], 1, "exact"),
    ]


@pytest.mark.parametrize("headers", TOLD)
async def test_a_reflection_without_tools_does_not_break_the_path_of_the_calls_with_tools(
    world: World, headers: dict[str, str]
) -> None:
    """The longest conversation is the reflection's, but its prompt was rendered without the tools.

    So its tokens cannot be reused: a call with tools continues the last one with the same tools.
    """
    agent = Agent(world, CODER, FIX, headers=headers, tools=TOOLS)
    await agent.ask(answer="I look at add() first.")
    await agent.ask(user("Reflect on what you did."), answer="I have not looked yet.", tools=None)
    await agent.ask(user("Go on."), answer="add() subtracts.")
    await agent.ask(user("Reflect again."), answer="Now I know.", tools=None)
    await agent.ask(user("Fix it."), answer="It is fixed.")
    first, reflection, second, again, third = await world.turns()
    assert len(set(agent.sessions)) == 1
    assert (second.parent_id, second.continuation) == (first.id, "exact")
    assert (third.parent_id, third.continuation) == (second.id, "exact")
    assert (again.parent_id, again.continuation) == (reflection.id, "exact")
    paths = await whole_paths(world)
    assert paths[third.id][: len(paths[first.id])] == paths[first.id], "the sampled tokens are in the prompt"
