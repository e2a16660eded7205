"""What is stored of calls with text to redact, and how such a conversation continues."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.contract.arrays import unpack_logprobs
from proxy.tokens.template import ChatTemplate
from proxy.turns.repository import TurnRepository
from proxy.turns.service import TrajectoryStore
from tests.proxy.calls.world import World, open_world

SECRETS = ("ada@example.org", "+44 20 7946 0958")
ASKED = {"role": "user", "content": f"I am {SECRETS[0]}. Who are you?"}
RUN = {"redaction": {"rules": ["email", "phone"]}}


@pytest.fixture
async def redacting(database_url: str, tmp_path: Path, template: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tmp_path, template, RUN, url=database_url) as world:
        yield world


async def stored(world: World) -> tuple[list[Any], str]:
    """Return the turns, and everything stored about them as one text, with ids decoded."""
    turns = await world.turns()
    paths = await world.store.database.read(
        lambda connection: TurnRepository(connection).pieces([turn.id for turn in turns])
    )
    decoded = [
        world.template.tokenizer.decode([*piece.prompt_ids, *piece.output_ids], skip_special_tokens=skipped)
        for piece in paths.values()
        for skipped in (True, False)
    ]
    columns = [repr([value for value in turn if not isinstance(value, bytes)]) for turn in turns]
    return turns, "\n".join([*decoded, *columns])


async def test_a_secret_is_not_stored_and_the_client_gets_the_whole_answer(redacting: World) -> None:
    redacting.say(f"Call {SECRETS[1]}, please.")
    answer = await redacting.post({"messages": [ASKED], "logprobs": True, "stop": [SECRETS[0]]})
    assert SECRETS[1] in answer.json()["choices"][0]["message"]["content"]
    (turn,), text = await stored(redacting)
    assert not any(secret in text for secret in SECRETS)
    assert "[email]" in text
    assert "[phone]" in text
    logprobs = unpack_logprobs(turn.output_logprobs)
    ids = (await record_of(redacting, turn.id)).output_ids
    assert len(ids) == len(logprobs)
    prompt_count = turn.prompt_token_count
    masked = {at - prompt_count for start, end in turn.masked for at in range(start, end) if at >= prompt_count}
    assert masked
    assert all(logprobs[at] == 0.0 for at in masked)


async def record_of(world: World, turn_id: str) -> Any:
    return await world.store.database.read(lambda connection: TurnRepository(connection).pieces([turn_id])[turn_id])


async def test_a_conversation_continues_the_recorded_tokens(redacting: World) -> None:
    redacting.say(f"Call {SECRETS[1]}, please.", "Fine.")
    messages = await said(redacting, "x1")
    await redacting.post({"messages": messages}, X_Session_Id="x1")
    sent = redacting.engine.requests[-1].input_ids
    assert all(secret in redacting.template.tokenizer.decode(list(sent)) for secret in SECRETS)
    turns, text = await stored(redacting)
    assert turns[-1].continuation == "exact"
    assert not any(secret in text for secret in SECRETS)


async def test_after_a_restart_it_branches_before_what_was_redacted(redacting: World) -> None:
    redacting.say(f"Call {SECRETS[1]}, please.", "Fine.")
    messages = await said(redacting, "x1")
    fresh = TrajectoryStore(
        database=redacting.store.database, clock=redacting.store.clock, signals=redacting.store.signals
    )
    redacting.trajectories._paths = fresh._paths  # a new process has nothing in memory
    await redacting.post({"messages": messages}, X_Session_Id="x1")
    sent = redacting.engine.requests[-1].input_ids
    assert all(secret in redacting.template.tokenizer.decode(list(sent)) for secret in SECRETS)
    turns, text = await stored(redacting)
    assert turns[-1].continuation in ("edited", "retemplated")
    first_redacted = turns[0].masked[0][0]
    assert turns[-1].prefix_tokens <= first_redacted
    assert not any(secret in text for secret in SECRETS)


async def said(world: World, session: str) -> list[dict[str, Any]]:
    """Make a first call, and return what its client sends next."""
    answer = (await world.post({"messages": [ASKED]}, X_Session_Id=session)).json()
    return [ASKED, answer["choices"][0]["message"], {"role": "user", "content": "Thanks."}]


async def test_without_anything_to_redact_all_is_as_without_rules(
    redacting: World, tmp_path: Path, template: ChatTemplate
) -> None:
    (tmp_path / "plain").mkdir()
    async with open_world(tmp_path / "plain", template) as plain:
        for world in (redacting, plain):
            await world.post({"logprobs": True})
        ((one,), _), ((other,), _) = await stored(redacting), await stored(plain)
        for column in ("prompt_ids", "output_ids", "output_logprobs", "masked", "messages", "request", "spans"):
            assert getattr(one, column) == getattr(other, column), column
        assert one.masked is None
        assert [msgspec.json.encode(turn.response["choices"][0]["logprobs"]) for turn in (one, other)]
