"""Feedback in words in claims: what is trained on it, and where the teacher reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.claims.hints import HintMaker
from proxy.claims.service import ClaimService
from proxy.contract.arrays import unpack_ids
from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.trajectory import Trajectory
from proxy.errors import InvalidRequest
from proxy.feedback.rules import apply_changed_rules
from proxy.runs.service import RunView
from proxy.settings import ConfigurationError, RunSettings, TextSettings, load_settings
from proxy.tokens.template import ChatTemplate
from tests.engines.scripted.templates import FAMILIES, family
from tests.proxy.turns.world import World

MODEL = Path(__file__).parents[3] / "agents_examples" / "calculator" / "checkpoint"


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(str(MODEL))


def claims_of(world: World, template: ChatTemplate | None) -> ClaimService:
    async def template_of_run(_run: RunView) -> ChatTemplate | None:
        return template

    return ClaimService(
        database=world.database, clock=world.clock, signals=world.signals, template_of=template_of_run
    )


async def claim(world: World, template: ChatTemplate | None) -> ClaimedBatch:
    return await claims_of(world, template).claim(await world.current_run(), ClaimRequest(trainer="t", want=1))


async def learn_from_texts(world: World, *, train: bool = True) -> None:
    texts = {"train": train, "template": "HINT {feedback}"}
    settings = RunSettings.model_validate({"name": "policy", "model": "base/model", "texts": texts})
    await world.runs.ensure(settings)
    await apply_changed_rules(world.database, world.clock)


async def conversation(world: World, template: ChatTemplate) -> tuple[SessionId, list[TurnId]]:
    """Create an ended session of two turns, the second of which continues the first."""

    def prompt(*messages: dict[str, str]) -> tuple[int, ...]:
        return template.encode(template.render(messages, None, generation_prompt=True))

    question, answer = {"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}
    first_prompt = prompt(question)
    output = template.encode("3<|im_end|>")
    second_prompt = prompt(question, answer, {"role": "user", "content": "Sure?"})
    session_id = await world.session()
    first = await world.turn(session_id, prompt_ids=first_prompt, output_ids=output, conversation="a")
    shared = len(first_prompt) + len(output)
    assert second_prompt[:shared] == (*first_prompt, *output)
    second = await world.turn(
        session_id,
        parent=first,
        prefix_tokens=shared,
        prompt_ids=second_prompt[shared:],
        output_ids=output,
        conversation="b",
    )
    return session_id, [first.turn.id, second.turn.id]


async def end(world: World, session_id: SessionId) -> None:
    await world.text(session_id, "use the calculator", final=True)


def read_with_hints(trajectory: Trajectory, number: int, template: ChatTemplate) -> str:
    """Return the text that the teacher reads before the answer of a turn."""
    paths: list[tuple[int, ...]] = []
    for turn in trajectory.turns:
        before = () if turn.parent is None else paths[turn.parent][: turn.prefix_tokens]
        paths.append(before + turn.prompt_ids + turn.output_ids)
    turn = trajectory.turns[number]
    ids = list(paths[number][: turn.prefix_tokens + len(turn.prompt_ids)])
    for place, index in reversed(turn.hints):
        ids[place:place] = unpack_ids(trajectory.hints[index])
    return template.decode(ids)


async def test_a_text_alone_is_trained_on_if_the_run_says_so(world: World, template: ChatTemplate) -> None:
    session_id, _ = await conversation(world, template)
    await end(world, session_id)
    assert (await world.session_row(session_id)).training == "pending"
    assert (await claim(world, template)).claim_id is None
    await learn_from_texts(world)
    assert (await world.session_row(session_id)).training == "ready"
    (group,) = (await claim(world, template)).groups
    (trajectory,) = group.trajectories
    assert (trajectory.reward, [turn.reward for turn in trajectory.turns]) == (None, [None, None])
    assert [(each.turn_id, each.text, each.source) for each in trajectory.feedback] == [
        (None, "use the calculator", "api")
    ]


async def test_sessions_of_former_rules_are_not_handed_out(world: World, template: ChatTemplate) -> None:
    session_id, _ = await conversation(world, template)
    await learn_from_texts(world)
    await end(world, session_id)
    settings = RunSettings.model_validate({"name": "policy", "model": "base/model"})
    await world.runs.ensure(settings)
    assert (await world.session_row(session_id)).training == "ready"
    assert (await claim(world, template)).claim_id is None
    assert (await world.session_row(session_id)).training == "pending"


async def test_the_teacher_reads_texts_before_the_answers_that_they_are_about(
    world: World, template: ChatTemplate
) -> None:
    session_id, (_, second) = await conversation(world, template)
    await learn_from_texts(world)
    await world.text(session_id, "be surer", turn_id=second)
    await world.text(session_id, "shorter")
    await end(world, session_id)
    (group,) = (await claim(world, template)).groups
    (trajectory,) = group.trajectories
    about_session = "<|im_start|>user\nHINT shorter\nuse the calculator<|im_end|>\n"
    about_turn = "<|im_start|>user\nHINT be surer<|im_end|>\n"
    question = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    first, last = (read_with_hints(trajectory, number, template) for number in (0, 1))
    assert first == f"{question}{about_session}{opening}"
    sure = "3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    assert last == f"{question}{about_session}{opening}{sure}{about_turn}{opening}"


async def test_texts_beside_rewards_come_with_the_claim(world: World, template: ChatTemplate) -> None:
    session_id, _ = await conversation(world, template)
    await world.text(session_id, "fine")
    await world.reward(session_id, 1.0)
    (group,) = (await claim(world, template)).groups
    assert group.trajectories[0].reward == 1.0
    assert group.trajectories[0].hints


async def test_without_a_place_or_a_template_a_text_has_no_hint(world: World, template: ChatTemplate) -> None:
    for known in (None, template):
        session_id = await world.ready()
        await world.text(session_id, "fine")
        (group,) = (await claim(world, known)).groups
        (trajectory,) = group.trajectories
        assert [each.text for each in trajectory.feedback] == ["fine"]
        assert [turn.hints for turn in trajectory.turns] == [()]


@pytest.mark.parametrize("name", FAMILIES)
def test_only_a_template_without_an_opening_is_refused(name: str, tmp_path: Path) -> None:
    template = family(name, tmp_path)
    if name != "mistral":
        HintMaker(template, TextSettings())
        return
    with pytest.raises(InvalidRequest, match="opening"):
        HintMaker(template, TextSettings())


@pytest.mark.parametrize("wrong", ["there is no place", "{feedback} twice {feedback}"])
def test_a_template_has_one_place_for_the_texts(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="once"):
        load_settings(None, {"run": {"texts": {"template": wrong}}})


def test_long_texts_are_cut_with_a_notice() -> None:
    content = TextSettings(template="{feedback}").content(["x" * 4000, "y" * 4000])
    assert content == "x" * 4000 + "\n" + "y" * 95 + " […]"
