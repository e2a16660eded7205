"""Runtimes of models: one for each base model and its settings, loaded once, and used for its runs' calls only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.auth.service import PrincipalKind
from proxy.calls.runtime import Runtimes
from proxy.contract.policy import weight_label
from proxy.errors import Unavailable
from proxy.http.workers import Workers
from proxy.runs.service import RunView
from proxy.settings import ConfigurationError, RedactionSettings, RunSettings
from proxy.tokens.template import ChatTemplate
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.world import USER, World
from tests.proxy.tokens.models import write_model

SHOUTING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + (' loud' if loud else ' quiet') + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Reads the argument `loud`, which ChatML does not."""


class Loading:
    """Loads one template for every name, and counts the loads. While `gate` is cleared, loads wait."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.loaded: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: ConfigurationError | None = None

    def __call__(self, model: str, *, allow_control_tokens: bool) -> ChatTemplate:
        assert not allow_control_tokens
        assert threading.current_thread() is not threading.main_thread()
        self.loaded.append(model)
        self.gate.wait(timeout=10)
        if self.error is not None:
            raise self.error
        return self.template


@pytest.fixture
def loading(template: ChatTemplate) -> Loading:
    return Loading(template)


@pytest.fixture
async def runtimes(world: World, loading: Loading) -> AsyncIterator[Runtimes]:
    workers = Workers(1)
    made = Runtimes(
        trajectories=world.trajectories, workers=workers, clock=world.store.clock, load_template=loading, most=2
    )
    yield made
    await made.aclose()
    workers.close()


def run(world: World, model: str = "one", **settings: Any) -> RunView:
    changed = world.store.run.settings.model_copy(update=settings)
    return msgspec.structs.replace(world.store.run, base_model=model, settings=changed)


async def test_runs_with_equal_settings_share_a_runtime(world: World, runtimes: Runtimes, loading: Loading) -> None:
    shared = await runtimes.of(run(world))
    assert await runtimes.of(msgspec.structs.replace(run(world, max_new_tokens=7), id="run_other")) is shared
    assert loading.loaded == ["one"]


@pytest.mark.parametrize(
    "settings",
    [{"tool_parser": "none"}, {"images": "name"}, {"redaction": RedactionSettings(patterns={"digits": "[0-9]+"})}],
)
async def test_a_change_of_what_decides_a_runtime_makes_another(
    world: World, runtimes: Runtimes, settings: dict[str, Any]
) -> None:
    before, after = await runtimes.of(run(world)), await runtimes.of(run(world, **settings))
    assert before is not after
    assert (after.redactor is not None) is ("redaction" in settings)
    assert after.names_images is ("images" in settings)


async def test_demands_at_one_time_load_once_beside_the_event_loop(
    world: World, runtimes: Runtimes, loading: Loading
) -> None:
    loading.gate.clear()
    demands = [asyncio.create_task(runtimes.of(run(world))) for _ in range(4)]
    async with asyncio.timeout(10):
        while not loading.loaded:
            await asyncio.sleep(0)
    demands[0].cancel()
    loading.gate.set()
    first, *others = await asyncio.gather(*demands, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len(set(map(id, others))) == 1
    assert loading.loaded == ["one"]


async def test_the_number_of_runtimes_is_bounded(world: World, runtimes: Runtimes, loading: Loading) -> None:
    for model in ("one", "two", "one", "three", "one", "two"):
        await runtimes.of(run(world, model))
    assert loading.loaded == ["one", "two", "three", "two"], "the least recently used is dropped, and loaded again"


async def test_a_model_that_cannot_be_loaded_is_503_and_tried_again(
    world: World, runtimes: Runtimes, loading: Loading
) -> None:
    loading.error = ConfigurationError("there is no tokenizer.json")
    with pytest.raises(Unavailable, match="the run 'policy' cannot be loaded: there is no tokenizer"):
        await runtimes.of(run(world))
    assert runtimes.context_length(run(world)) is None
    loading.error = None
    assert (await runtimes.of(run(world))).context_length == 512


async def test_every_runs_call_is_parsed_and_rendered_with_its_own_template(world: World, tmp_path: Path) -> None:
    """One proxy serves two runs on two base models, each on an engine of its own."""
    store = world.store
    other = await store.runs.ensure(RunSettings(name="other", model="loud/model"))
    loud = ChatTemplate.load(str(write_model(tmp_path / "loud", template=SHOUTING, context_length=256)))
    engine = FakeEngine(lambda _: loud.encode("Yes.") + loud.stop_ids[:1], label=weight_label(other.id, 0))
    world.swaps.engines[other.id] = engine
    world.templates[other.base_model] = loud
    key = await store.credentials.create(PrincipalKind.RUN, run_id=other.id)
    asked = {"chat_template_kwargs": {"loud": True}, "n": 1}

    ours = await world.post(asked)
    theirs = await world.post({**asked, "model": "other"}, authorization=f"Bearer {key.text}")

    assert "template does not read loud" in ours.headers["x-base-rl-warning"]
    assert "x-base-rl-warning" not in theirs.headers
    assert theirs.json()["choices"][0]["message"]["content"] == "Yes."
    assert theirs.json()["system_fingerprint"] == "other@0"
    prompts = [world.template.decode(world.engine.requests[0].input_ids), loud.decode(engine.requests[0].input_ids)]
    question = f"{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [f"<|im_start|>user\n{question}", f"<|im_start|>user loud\n{question}"]
    too_long = {"messages": [{"role": "user", "content": "a b " * 150}], "model": "other"}
    refused = await world.post(too_long, authorization=f"Bearer {key.text}")
    assert "256 maximum" in refused.json()["error"]["message"]
    counted = await world.http.post(
        "/v1/messages/count_tokens",
        json={"model": "other", "messages": [USER]},
        headers={"authorization": f"Bearer {key.text}"},
    )
    assert counted.json()["input_tokens"] == len(engine.requests[0].input_ids) + len(loud.encode(" quiet")) - len(
        loud.encode(" loud")
    )
