from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agents_examples.debate.agent import OPPONENT, Debate, attempt, debate, heard, instruction
from agents_examples.debate.reward import reward
from agents_examples.debate.tasks import Motion, Sum, is_sound, motion_of, random_motion, winner
from benchmarks.examples.report import readme_rows
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import ScriptedServer, says
from tests.agents_examples.starting import first_answers
from tests.docs.markdown import ROOT, rows

MOTION = Motion(opener=Sum(a=7, b=8), replier=Sum(a=4, b=9))
SOUND, OTHER_SOUND, INSISTS = "7 + 8 = 15", "4 + 9 = 13", "Mine is larger, trust me."


async def test_the_replying_side_hears_the_opening_one() -> None:
    opener, opponent = ScriptedServer(lambda _: says(SOUND)), ScriptedServer(lambda _: says(INSISTS))
    async with opener.client() as one, opponent.client() as other:
        held = await debate(one, other, "debate", MOTION)
    assert held == Debate(opening=SOUND, reply=INSISTS, sound=(True, False), winner=0)
    asked = [server.requests[0]["messages"][0]["content"] for server in (opener, opponent)]
    assert asked == [
        "7 + 8 or 4 + 9? Argue that 7 + 8 is larger.",
        f"7 + 8 or 4 + 9? Argue that 4 + 9 is larger. The other side says: {SOUND}",
    ]
    assert [server.requests[0]["model"] for server in (opener, opponent)] == ["debate", OPPONENT]


@pytest.mark.parametrize(
    ("statement", "sound"),
    [
        (SOUND, True),
        ("I say 7 + 8 = 15.", True),
        ("7 + 8 = 16", False),
        (OTHER_SOUND, False),
        (f"{SOUND}, {SOUND}", False),
        (f"{SOUND}, and 4 + 9 = 3", False),
        ("17 + 8 = 15", False),
        ("15", False),
        ("", False),
        ("7 + 8 = 1500000", False),
    ],
)
def test_a_sound_statement_works_out_its_own_sum_and_claims_nothing_else(statement: str, sound: bool) -> None:
    assert is_sound(MOTION.opener, statement) == sound


@pytest.mark.parametrize(
    ("opening", "reply", "won"),
    [(SOUND, OTHER_SOUND, 0), (SOUND, INSISTS, 0), (INSISTS, OTHER_SOUND, 1), (INSISTS, INSISTS, None)],
)
def test_nobody_wins_without_a_sound_statement(opening: str, reply: str, won: int | None) -> None:
    assert winner(MOTION, opening, reply) == won
    turned = Motion(opener=MOTION.replier, replier=MOTION.opener)
    assert winner(turned, reply, opening) == (None if won is None else 1 - won)


def test_the_winner_alone_is_rewarded_and_soundness_is_shown() -> None:
    held = Debate(opening=SOUND, reply=OTHER_SOUND, sound=(True, True), winner=0)
    assert reward({}, held) == {"reward": 1.0, "components": {"sound": 1.0}}
    assert held.feedback(1) == {"reward": 0.0, "components": {"sound": 1.0}}


async def test_the_opponents_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPPONENT_API_KEY", raising=False)

    class Session:
        id, base_url, api_key, model = "ses_1", "http://base-rl.test/v1", "k", "debate"

    with pytest.raises(KeyError, match="base-rl keys create --kind run --run opponent"):
        await attempt({"opener": [7, 8], "replier": [4, 9]}, Session())


def test_motions_have_a_larger_side() -> None:
    tasks = map(json.loads, (EXAMPLES / "debate" / "tasks.jsonl").read_text().splitlines())
    assert all(motion.opener.result != motion.replier.result for motion in map(motion_of, tasks))


def test_both_sides_start_with_few_sound_statements() -> None:
    rng = random.Random(0)
    motions = [random_motion(rng) for _ in range(96)]
    opening = [instruction(motion, motion.opener) for motion in motions]
    replying = [heard(instruction(motion, motion.replier), INSISTS) for motion in motions]
    for own, asked in (([one.opener for one in motions], opening), ([one.replier for one in motions], replying)):
        conversations = [[{"role": "user", "content": text}] for text in asked]
        said = first_answers(EXAMPLES / "debate" / "checkpoint", conversations, temperature=1.0, longest=24)
        sound = [is_sound(one, text) for one, text in zip(own, said, strict=True)]
        assert 0 < sum(sound) / len(sound) <= 0.4


def test_the_readme_has_the_figures_of_both_sides() -> None:
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "examples.json").read_text())
    page = (EXAMPLES / "debate" / "README.md").read_text()
    for row in readme_rows(measured["debate-opponent"]):
        assert row in rows(page)
    assert (ROOT / "docs" / "images" / "example-debate-opponent.svg").exists()
